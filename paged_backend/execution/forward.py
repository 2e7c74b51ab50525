"""Runs one forward pass of a model over a packed batch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.execution.batch import PackedBatch
from paged_backend.kv.cache import KVCache, StateCache
from paged_backend.models.attention import AttentionMeta


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
