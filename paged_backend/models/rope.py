"""Rotary embeddings whose angles depend on the sequence length.

Two of transformers' rope types are length-dependent. "dynamic" (NTK) scales the angles of every position once the
longest sequence of a forward pass exceeds `max_position_embeddings`, and "longrope" (https://arxiv.org/abs/2402.13753)
switches to other factors beyond `original_max_position_embeddings`. Neither works with paged attention: a step contains
sequences of different lengths, and cached keys would have to be rotated again when a sequence crosses the threshold.
Below the threshold the angles are constant, so it limits the context length of such a model.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

LENGTH_DEPENDENT = ("dynamic", "longrope")


def parameters(text_config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return all rope parameters of a model. Some models have separate ones for each layer type."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def max_static_len(text_config: PretrainedConfig) -> tuple[int | None, str]:
    """Return the length up to which the angles of all positions are constant, and the reason for the limit.

    The length is None if the model's configuration has no limit.
    """
    limit, reason = getattr(text_config, "max_position_embeddings", None), "the model's own limit"
    for rope in parameters(text_config):
        kind = rope.get("rope_type")
        if kind in LENGTH_DEPENDENT and limit is not None:
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            limit = min(limit, original or limit)
            reason = f'beyond which rope type "{kind}" changes the angles of all positions'
    return limit, reason


def freeze_rope(model: PreTrainedModel) -> None:
    """Use the static angles of lengths up to `max_static_len`, without inspecting the positions.

    Inspecting them would synchronize with the device in every step, which also prevents CUDA graph capture.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in LENGTH_DEPENDENT:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {key: "default" if value in LENGTH_DEPENDENT else value for key, value in kind.items()}
