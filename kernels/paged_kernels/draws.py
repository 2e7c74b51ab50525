"""How the rows of a step draw their tokens. Imports no triton."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SamplingFilters:
    """Which tokens a row may draw, by their logits: the `top_k` largest; of these as few of the largest as have the
    share `top_p` of their probability; and of these what is at most `margin` below the largest. Equal logits stay or go
    together."""

    top_k: Tensor  # [num_rows] int32; the vocabulary's size or more: off
    top_p: Tensor  # [num_rows] float32, above 0; 1 or more: off
    margin: Tensor  # [num_rows] float32, of logits: -log(min_p) * temperature; infinity: off


@dataclass(frozen=True, eq=False)
class SamplingMetadata:
    """One entry a row; all tensors on one device."""

    scales: Tensor  # [num_rows] float32: 1 / temperature; 0: the largest logit, without filters
    seeds: Tensor  # [num_rows] int64: any 64 bits
    positions: Tensor  # [num_rows] int64: tokens that the row's sequence has generated
    filters: SamplingFilters | None  # None: no row has one

    def __post_init__(self) -> None:
        assert self.scales.dtype == torch.float32 and self.scales.dim() == 1
        for whole in (self.seeds, self.positions):
            assert whole.dtype == torch.int64 and whole.shape == self.scales.shape
        if self.filters is not None:
            assert self.filters.top_k.dtype == torch.int32
            assert self.filters.top_p.dtype == self.filters.margin.dtype == torch.float32
            assert self.filters.top_k.shape == self.filters.top_p.shape == self.filters.margin.shape
            assert self.filters.top_k.shape == self.scales.shape
