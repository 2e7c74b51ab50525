"""Runs one forward pass of a model over a packed batch, and records its last hidden states."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.execution.batch import PackedBatch
from paged_backend.kv.cache import KVCache
from paged_backend.kv.state_cache import StateCache
from paged_backend.models.attention import AttentionMeta

log = logging.getLogger("paged_llm")


@torch.inference_mode()
def paged_logits(model: PreTrainedModel, batch: PackedBatch, kv: KVCache, states: StateCache | None = None) -> Tensor:
    """Run one forward pass over a packed batch and return the logits [num_samples, vocab] of the rows that sample.
    states: those of the recurrent layers, if the model has any."""
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.sample_rows,
        paged=AttentionMeta(batch.paging, kv, batch.more_pages, batch.state_rows, states),
    ).logits[0]
    # A model without the parameter logits_to_keep projects every row.
    return logits if len(logits) == len(batch.sample_rows) else logits[batch.sample_rows]


@torch.inference_mode()
def paged_hidden_states(model: PreTrainedModel, batch: PackedBatch, kv: KVCache) -> Tensor:
    """Run one forward pass of a stage before the last over a packed batch. Returns the hidden states [num_tokens,
    hidden_size] for the next stage."""
    output = model.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        paged=AttentionMeta(batch.paging, kv, batch.more_pages),
    )
    states: Tensor = output.last_hidden_state[0]
    return states


@contextmanager
def record_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the last hidden states, [1, num_tokens, hidden_size], of each forward pass inside the context."""
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
    """Measure the hidden size in a forward pass over one token. The model must use its own attention.

    Returns None if the model has no decoder separate from its head, or if the decoder does not return one hidden state
    per token.
    """
    if model.base_model is model:
        return None
    try:
        with record_hidden_states(model) as states:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    except Exception:  # reported by `verify_model`, which follows
        return None
    shapes = [tuple(state.shape) if isinstance(state, Tensor) else () for state in states]
    if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][:2] != (1, 1):
        log.info("%s does not support embeddings: its hidden states have the shapes %s", type(model).__name__, shapes)
        return None
    return shapes[0][2]
