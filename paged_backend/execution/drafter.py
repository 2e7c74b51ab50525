"""A draft model that proposes tokens on the device; the model verifies them in the same step.

The draft model shares the blocks of the model: its layers follow the model's in the KV cache, so a block that is
copied, swapped or hit in the prefix cache carries the draft model's keys and values as well. In each step it first runs
over its own proposals, one token per sequence at a time, then over the whole batch. It samples with the random numbers
that the model will use, so both choose the same token if their probabilities agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.execution.batch import Drafting, PackedBatch
from paged_backend.execution.forward import paged_logits
from paged_backend.kv.cache import KVCache
from paged_backend.sampling.sampler import sample
from paged_kernels.paging import PageAddresses, Paging


@dataclass(frozen=True, eq=False)
class Drafter:
    """A draft model over its own layers of the KV cache."""

    model: PreTrainedModel
    kv: KVCache

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return the draft model's logits [num_samples, vocab] of a batch."""
        return paged_logits(self.model, batch, self.kv)

    def update_kv(self, batch: PackedBatch) -> None:
        """Compute the draft model's keys and values of a batch, with or without draft tokens in it."""
        self.forward(replace(batch, sample_rows=batch.sample_rows[:0]))


def propose(batch: PackedBatch, drafting: Drafting, forward: Callable[[PackedBatch], Tensor]) -> PackedBatch:
    """Return the batch with its draft tokens filled in. forward: a function like `Drafter.forward`."""
    ids = batch.input_ids.clone()
    for number in range(len(drafting.counts)):
        _propose_round(ids, batch, drafting, number, forward)
    return replace(batch, input_ids=ids)


def _propose_round(
    ids: Tensor, batch: PackedBatch, drafting: Drafting, number: int, forward: Callable[[PackedBatch], Tensor]
) -> None:
    count = drafting.counts[number]
    rows, seqs, paging = drafting.rows[:count] + number, drafting.seqs[:count], batch.paging
    positions = batch.position_ids[:, rows]
    one_each = Paging(
        slots=paging.slots[rows],
        block_tables=paging.block_tables[seqs],
        context_lens=positions[0].int() + 1,
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=ids.device),
        max_query_len=1,
        max_context_len=paging.max_context_len,
    )
    more_pages = tuple(PageAddresses(page.slots[rows], page.tables[seqs]) for page in batch.more_pages)
    all_rows = one_each.query_starts[:-1].long()
    step = PackedBatch(ids[:, rows], positions, one_each, all_rows, None, drafting.sampling[number], False, more_pages)
    # Sampling gives -1 for logits that are not finite. Any token is fine there, because the model verifies it.
    ids[0, rows + 1] = sample(forward(step), step.sampling).clamp(min=0)
