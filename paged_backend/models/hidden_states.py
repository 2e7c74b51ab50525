"""What a model's decoder hands to its head, for whoever wants that rather than logits."""

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
    """The last hidden states, [1, num_tokens, hidden_size], of each forward pass while it lasts."""
    states: list[Tensor] = []

    def keep(decoder: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        states.append(output[0])

    hook = model.base_model.register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()


@torch.inference_mode()
def hidden_size(model: PreTrainedModel) -> int | None:
    """Seen in a forward pass over one token; None for a model whose decoder cannot be told from its head, or does not
    give hidden states for every token. The model is on an attention of its own."""
    if model.base_model is model:
        return None
    try:
        with record_hidden_states(model) as states:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception:  # the proof that follows says what is wrong
        return None
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else () for one in states]
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 1):
        log.info("%s gives no embeddings: its hidden states have the shapes %s", type(model).__name__, shapes)
        return None
    return shapes[0][2]
