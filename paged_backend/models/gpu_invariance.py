"""Batch-invariant models on a GPU: every linear layer is computed by `invariant_linear`, in place of cuBLAS.

Between the linear layers and attention, the layers of a fused model run kernels of this project, which compute each row
by itself. Modules of transformers and of other libraries run PyTorch's kernels, of which those with a sum or a product
choose their order by the number of rows. A model with such modules is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.decoder import FusedExperts, FusedLatents
from paged_backend.models.fusion import FusedModel
from paged_backend.models.linear import replace_forwards
from paged_kernels.ops import invariant_linear

REASON = "batch_invariant=true: not supported on a GPU: {}; leave it out, or run the model on a CPU"


@dataclass(frozen=True, eq=False)
class InvariantWeight:
    """A weight [out_features, in_features] that is multiplied in one order for any number of rows."""

    weight: Tensor

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return invariant_linear(x.flatten(0, -2), self.weight, bias).view(*x.shape[:-1], -1)


def install_invariant(model: PreTrainedModel, fused: FusedModel | str) -> None:
    """Make a model compute each row by itself. `fused`: what `fuse` returned. Raises UnsupportedModel."""
    if isinstance(fused, str):
        raise UnsupportedModel(REASON.format(f"its layers are not fused, because {fused}"))
    if reason := next(_obstacles(model, fused), None):
        raise UnsupportedModel(REASON.format(reason))
    fused.install(InvariantWeight)
    replace_forwards([module for module in _outer_modules(model) if isinstance(module, nn.Linear)], InvariantWeight)


def _obstacles(model: PreTrainedModel, fused: FusedModel) -> Iterator[str]:
    for layer in fused.decoder.layers:
        if isinstance(layer.mlp, FusedExperts):
            yield f"the products of a mixture of experts ({type(layer.mlp.module).__name__}) depend on the batch"
        if isinstance(layer.attention, FusedLatents):
            yield f"the products of latent attention ({type(layer.attention.module).__name__}) depend on the batch"
    for module in _outer_modules(model):
        is_known = type(module) in (nn.Linear, nn.Embedding) or module is model.model.norm
        if not is_known and any(True for _ in module.parameters(recurse=False)):
            yield f"the sums of {type(module).__name__} may depend on the batch"


def _outer_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules outside of the decoder layers."""
    inner = {id(module) for layer in model.model.layers for module in layer.modules()}
    return (module for module in model.modules() if id(module) not in inner)
