"""LoRA factors in the layout of the CPU kernels, which add in one order for any number of rows and adapters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.models.adapter_rows import AdapterRows
from paged_backend.models.peft_files import Factors
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import PackedLinear, pack_linear


class RowsBySlot(NamedTuple):
    """The rows of a step with an adapter, by slot."""

    order: Tensor  # [num_rows] int64, rows of the step
    starts: Tensor  # [slots + 1] int64: where the rows of each slot start in `order`

    @classmethod
    def of(cls, rows: AdapterRows, slots: int) -> RowsBySlot:
        """Sort the rows of a step by slot."""
        used = ~rows.masked[..., 0].T  # [num_used, num_tokens]
        counts = torch.zeros(slots, dtype=torch.int64)
        counts[rows.slots] = used.sum(1)
        return cls(used.nonzero()[:, 1], F.pad(counts.cumsum(0), (1, 0)))


class PackedFactors:
    """The factors of one linear layer in float32, for each slot, padded with zeros to the maximum rank."""

    def __init__(self, inputs: int, outputs: int, *, slots: int, rank: int) -> None:
        self.outputs, self._rank = outputs, rank
        self._a = [pack_linear(torch.zeros(rank, inputs)) for _ in range(slots)]
        self._b = [pack_linear(torch.zeros(outputs, rank)) for _ in range(slots)]
        self._down, self._up = native.ExpertLinear(self._a), native.ExpertLinear(self._b)

    @property
    def nbytes(self) -> int:
        return sum(packed.groups.nbytes for packed in (*self._a, *self._b))

    def load_slot(self, slot: int, factors: Factors | None) -> None:
        """Copy an adapter's factors into a slot; None clears the slot."""
        if factors is None:
            self._a[slot].groups.zero_()
            self._b[slot].groups.zero_()
            return
        missing = self._rank - len(factors.a)
        _overwrite(self._a[slot], F.pad(factors.a.float(), (0, 0, 0, missing)))
        _overwrite(self._b[slot], F.pad(factors.b.float(), (0, missing)))

    def fill_dummy(self, slot: int) -> None:
        """Do nothing: every slot is computed, whether its adapter changes this layer or not."""

    def add(self, y: Tensor, x: Tensor, rows: RowsBySlot) -> None:
        """Add the adapters' outputs for x [num_tokens, in_features] to y [num_tokens, out_features] in place."""
        product = self._up(self._down(x[rows.order], rows.starts), rows.starts)
        y[rows.order] = (y[rows.order] + product).to(y.dtype)


def _overwrite(packed: PackedLinear, weight: Tensor) -> None:
    packed.groups.copy_(pack_linear(weight).groups)
