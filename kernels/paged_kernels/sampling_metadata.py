"""Sampling parameters of the rows of a step. Imports no triton."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingFilters:
    """top-k, top-p and min-p of each row, applied to its logits in this order.

    A row keeps its `top_k` largest logits; of these, the smallest number of largest ones whose probability mass reaches
    `top_p`; and of these, those at most `margin` below the largest. Equal logits are kept or dropped together.
    """

    top_k: Tensor  # [num_rows] int32; the vocabulary size or more: off
    top_p: Tensor  # [num_rows] float32, above 0; 1 or more: off
    margin: Tensor  # [num_rows] float32, in logits: -log(min_p) * temperature; infinity: off


@dataclass(frozen=True, eq=False)
class SamplingMetadata:
    """Sampling parameters with one entry per row. All tensors are on one device."""

    scales: Tensor  # [num_rows] float32: 1 / temperature; 0: greedy, without filters
    seeds: Tensor  # [num_rows] int64: any 64 bits
    positions: Tensor  # [num_rows] int64: number of tokens that the row's sequence has generated
    filters: SamplingFilters | None  # None: no row has a filter

    def __post_init__(self) -> None:
        assert self.scales.dtype == torch.float32 and self.scales.dim() == 1
        for integers in (self.seeds, self.positions):
            assert integers.dtype == torch.int64 and integers.shape == self.scales.shape
        if self.filters is not None:
            assert self.filters.top_k.dtype == torch.int32
            assert self.filters.top_p.dtype == self.filters.margin.dtype == torch.float32
            assert self.filters.top_k.shape == self.filters.top_p.shape == self.filters.margin.shape
            assert self.filters.top_k.shape == self.scales.shape
