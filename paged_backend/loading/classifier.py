"""Load what turns hidden states into classes: the head of a sequence classification model, or two tokens' logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paged_backend.api.errors import ConfigError
from paged_backend.api.limits import ClassificationSpec
from paged_backend.files.model_files import CONFIG
from paged_backend.loading.model_sizes import read_tensor
from paged_backend.loading.model_source import ModelSource
from paged_backend.models.hidden_states import record_hidden_states

HEAD = "score.weight"  # name of the weight in GenericForSequenceClassification of transformers
TOLERANCE = 0.02  # maximum error of a difference of logits, relative to the largest logit; 16-bit dtypes round to 0.4%


def is_classifier(hf_config: PretrainedConfig) -> bool:
    """Return whether the files hold a model for sequence classification."""
    return any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or ())


def as_decoder(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the decoder below the head. It needs no output layer, which the files do not have."""
    decoder = type(hf_config).from_dict(hf_config.to_dict())
    decoder.tie_word_embeddings = True
    return decoder


def load_classifier(
    source: ModelSource,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[str] | None = None,
    *,
    renders_pairs: bool = False,
) -> ClassificationSpec | None:
    """Return how the model classifies, or None if it does not.

    Args:
        source: the model's files.
        model: the model with its own weights and attention.
        tokenizer: the model's tokenizer.
        tokens: the engine option `classifier_from_token`.
        renders_pairs: whether the chat template is made for pairs of a query and a document.

    Raises ConfigError.
    """
    hf_config, path = source.hf_config, source.path
    if is_classifier(hf_config):
        if tokens is not None:
            raise ConfigError(
                f"classifier_from_token={json.dumps(list(tokens))}: {path} has a head for classification; leave it out"
            )
        labels = tuple(str(hf_config.id2label[index]) for index in range(hf_config.num_labels))
        return ClassificationSpec(labels, _activation(hf_config), _read_head(source), renders_pairs)
    if tokens is None:
        return None
    return ClassificationSpec((tokens[1],), "sigmoid", _of_tokens(model, tokenizer, tokens), renders_pairs)


def _activation(hf_config: PretrainedConfig) -> Any:
    """Return the activation for transformers' `problem_type`. By default, labels exclude one another."""
    problem = getattr(hf_config, "problem_type", None)
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or hf_config.num_labels == 1 else "softmax"


def _read_head(source: ModelSource) -> np.ndarray:
    """Return the head's weight, [num_labels, hidden_size] float32."""
    hf_config, path = source.hf_config, source.path
    shape = (hf_config.num_labels, hf_config.get_text_config().hidden_size)
    if source.dummy_seed is not None:
        return np.random.default_rng(source.dummy_seed).normal(0, 0.02, shape).astype(np.float32)
    weight = read_tensor(path, HEAD)
    if weight is None or weight.shape != shape:
        has = "is missing" if weight is None else f"has the shape {list(weight.shape)}"
        raise ConfigError(f"{path}: {HEAD} {has}; {path / CONFIG} describes one of {list(shape)}")
    return np.ascontiguousarray(weight.float().numpy())


@torch.inference_mode()
def _of_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> np.ndarray:
    """Return the weight that gives the second token's logit minus the first one's, [1, hidden_size] float32."""
    field = f"classifier_from_token={json.dumps(list(tokens))}"
    ids = []
    for token in tokens:
        encoded = tokenizer.encode(token, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(f"{field}: {json.dumps(token)} is {len(encoded)} tokens; must be one")
        ids += encoded
    layer = model.get_output_embeddings()
    weight = getattr(layer, "weight", None)
    if weight is None or not weight.is_floating_point() or model.base_model is model:
        raise ConfigError(f"{field}: {type(model).__name__} has no output layer that can be read")
    difference = (weight[ids[1]].float() - weight[ids[0]].float())[None]
    with record_hidden_states(model) as states:
        logits = model(input_ids=torch.tensor([[ids[0]]], device=model.device), use_cache=False).logits[0, -1].float()
    expected = float(logits[ids[1]] - logits[ids[0]])
    actual = float(difference @ states[0][0, -1].float())
    if abs(actual - expected) > TOLERANCE * float(logits.abs().max()):
        raise ConfigError(f"{field}: {type(model).__name__} changes its logits after the output layer")
    return np.ascontiguousarray(difference.cpu().numpy())


def without_head(info: dict[str, Any]) -> dict[str, Any]:
    """Return the loading info of transformers without the head, which the decoder does not have."""
    return {**info, "unexpected_keys": [name for name in info["unexpected_keys"] if name != HEAD]}
