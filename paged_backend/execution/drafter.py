"""A smaller model that guesses, on the device, what the larger one then checks in the same step.

It lives in the same blocks: its layers follow the model's in the cache, so whatever happens to a block, a copy, a move
or a hit, happens to its keys and values, too. It runs over every batch, and before that, one token at a time, over what
it guesses. It draws with the random numbers that the model will draw with: where their probabilities agree, they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from paged_kernels.paging import Paging
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.execution.batch import Drafting, PackedBatch
from paged_backend.execution.forward import paged_logits
from paged_backend.memory.kv_cache import KVCache
from paged_backend.sampling.sampler import sample


@dataclass(frozen=True, eq=False)
class Drafter:
    model: PreTrainedModel
    kv: KVCache  # its own layers

    def forward(self, batch: PackedBatch) -> Tensor:
        return paged_logits(self.model, batch, self.kv)

    def update_kv(self, batch: PackedBatch) -> None:
        """Compute its own keys and values of a batch, guesses in it or none."""
        self.forward(replace(batch, sample_rows=batch.sample_rows[:0]))


def fill(batch: PackedBatch, drafting: Drafting, forward: Callable[[PackedBatch], Tensor]) -> PackedBatch:
    """Put guesses into a batch that wants them. forward: as the drafter's."""
    ids = batch.input_ids.clone()
    for turn in range(len(drafting.counts)):
        _guess(ids, batch, drafting, turn, forward)
    return replace(batch, input_ids=ids)


def _guess(
    ids: Tensor, batch: PackedBatch, drafting: Drafting, turn: int, forward: Callable[[PackedBatch], Tensor]
) -> None:
    count = drafting.counts[turn]
    rows, seqs, paging = drafting.rows[:count] + turn, drafting.seqs[:count], batch.paging
    positions = batch.position_ids[:, rows]
    one_each = Paging(
        slots=paging.slots[rows],
        block_tables=paging.block_tables[seqs],
        context_lens=positions[0].int() + 1,
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=ids.device),
        max_query_len=1,
        max_context_len=paging.max_context_len,
    )
    every = one_each.query_starts[:-1].long()
    step = PackedBatch(ids[:, rows], positions, one_each, every, None, drafting.sampling[turn], False)
    ids[0, rows + 1] = sample(forward(step), step.sampling).clamp(min=0)  # a guess, be it of a row that is not finite
