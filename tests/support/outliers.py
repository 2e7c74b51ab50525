"""Random models whose activations have the outliers of trained ones."""

import torch


@torch.no_grad()
def add_outliers(model):
    """Give a random model weights that cause outliers. Returns the model.

    Two channels of the embeddings are 30 and 100 times larger than the others, as massive activations are
    (arXiv:2402.17762), the weights of its norms are from 0.1 to 50, and some biases are 20 times larger than others.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(size, low, high):
        """Draw numbers whose logarithm is uniform."""
        return low * (high / low) ** torch.rand(size, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            offset = 1 - float(parameter.float().mean())  # Gemma adds 1
            parameter.copy_(draw(parameter.shape, 0.1, 10) - offset)
            parameter[3] = 50
        elif name.endswith("bias"):
            parameter.normal_(generator=generator)
            parameter[..., ::17] *= 20
        elif name.endswith("sinks"):
            parameter.normal_(generator=generator)
        elif parameter.dim() >= 2:
            parameter *= 0.5 / (parameter.float().std() * parameter.shape[-1] ** 0.5)
    embeddings = model.get_input_embeddings().weight
    embeddings.normal_(generator=generator)
    embeddings[:, 5] *= 30
    embeddings[:, 11] *= -100
    return model
