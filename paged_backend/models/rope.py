"""Rotary embeddings whose angles depend on the length of what runs.

Of transformers' rope types, "dynamic" (NTK) stretches the angles of every position with the longest sequence of a
forward pass once that is past `max_position_embeddings`, and "longrope" (https://arxiv.org/abs/2402.13753) has other
factors past `original_max_position_embeddings`. Neither can be had through pages: a step holds sequences of many
lengths, and keys that are in the pages would have to be turned anew when one of them gets there. Up to that length the
angles are the same for all, so that is as long as such a model is served.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

LENGTH_DEPENDENT = ("dynamic", "longrope")


def parameters(text_config: PretrainedConfig) -> list[dict[str, Any]]:
    """All that a model has: some have others for each kind of layer."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [rope, *(one for one in rope.values() if isinstance(one, dict))]


def longest(text_config: PretrainedConfig) -> tuple[int | None, str]:
    """Tokens up to which every position keeps its angle, and what says so; None where the model names no limit."""
    limit, reason = getattr(text_config, "max_position_embeddings", None), "the model's own limit"
    for one in parameters(text_config):
        kind = one.get("rope_type")
        if kind in LENGTH_DEPENDENT and limit is not None:
            original = one.get("original_max_position_embeddings") if kind == "longrope" else None
            limit = min(limit, original or limit)
            reason = f'past which rope type "{kind}" would change the angles of all positions of a sequence'
    return limit, reason


def freeze_rope(model: PreTrainedModel) -> None:
    """Keep the angles of lengths up to `longest`, without a look at the positions: that would make the host wait for
    the device in every step, and no step could be recorded."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in LENGTH_DEPENDENT:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {key: "default" if one in LENGTH_DEPENDENT else one for key, one in kind.items()}
