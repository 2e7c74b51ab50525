"""The last hidden states of a model, from which embeddings are computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

log = logging.getLogger("paged_llm")


@contextmanager
def record_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the last hidden states, [1, num_tokens, hidden_size], of each forward pass inside the context."""
    hidden_states: list[Tensor] = []

    def keep(decoder: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        hidden_states.append(output[0])

    hook = model.base_model.register_forward_hook(keep)
    try:
        yield hidden_states
    finally:
        hook.remove()


@torch.inference_mode()
def hidden_size(model: PreTrainedModel) -> int | None:
    """Measure the hidden size in a forward pass over one token. The model must use its own attention.

    Returns None if the model has no decoder separate from its head, or if the decoder does not return one hidden state
    per token.
    """
    if model.base_model is model:
        return None
    try:
        with record_hidden_states(model) as hidden_states:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception:  # reported by `verify_model`, which follows
        return None
    shapes = [tuple(state.shape) if isinstance(state, Tensor) else () for state in hidden_states]
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 1):
        log.info("%s does not support embeddings: its hidden states have the shapes %s", type(model).__name__, shapes)
        return None
    return shapes[0][2]
