"""Two caches between which whole blocks are copied; a cache may be both. Imports no triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockPair:
    """Tensors in pairs of one shape and type, whose first dimension is the block. What a copy needs of them is made
    once, as they stay where they are."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    table: Tensor  # [3, num_tensors] int64: addresses of the sources, of the targets, and bytes of a block
    largest: int  # bytes of a block
    aligned: int  # the power of two, up to 16, that addresses and bytes of blocks are multiples of

    @classmethod
    def of(cls, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> BlockPair:
        """The table goes to the GPU, where either is on one."""
        pairs = list(zip(sources, targets, strict=True))
        for source, target in pairs:
            assert source.is_contiguous() and target.is_contiguous()
            assert source.dtype == target.dtype and source.shape[1:] == target.shape[1:], (source.shape, target.shape)
        numbers = [[one.data_ptr() for one in sources], [one.data_ptr() for one in targets]]
        numbers.append([source[:1].nbytes for source, _ in pairs])
        device = next((one.device for pair in pairs for one in pair if one.device.type != "cpu"), torch.device("cpu"))
        return cls(
            tuple(sources),
            tuple(targets),
            table=torch.tensor(numbers, dtype=torch.int64).to(device),
            largest=max(numbers[2]),
            aligned=math.gcd(16, *itertools.chain(*numbers)),
        )
