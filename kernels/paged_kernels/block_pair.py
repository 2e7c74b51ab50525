"""Two caches between which whole blocks are copied; both may be the same cache. Imports no triton."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockPair:
    """The tensors of a source and of a target cache, paired by shape and type, with the block as first dimension.

    The table of addresses is built once, since the tensors do not move.
    """

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    table: Tensor  # [3, num_tensors] int64: addresses of the sources, addresses of the targets, bytes of a block
    largest: int  # size of the largest block in bytes
    aligned: int  # largest power of two, up to 16, that divides all addresses and block sizes

    @classmethod
    def of(cls, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> BlockPair:
        """Pair the tensors of two caches. The table is on the GPU if one of the caches is."""
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
            largest=max(numbers[2], default=0),
            aligned=math.gcd(16, *itertools.chain(*numbers)),
        )
