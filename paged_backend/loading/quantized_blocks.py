"""Quantized weights of files as codes, scales and minima: what the readers of all formats return.

A weight is scale * code + minimum. The codes are

    int8            integers of `bits` bits, for example -8..7
    float8_e4m3fn   FP8
    uint8           FP4 (e2m1), as its 4 bits

as `paged_kernels.cpu.packed_linear.pack_quantized` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.models.linear import GroupedCopy, JoinedWeight, PermutedWeight, Weight
from paged_kernels.cpu.packed_linear import E2M1, pack_quantized


class Blocks(NamedTuple):
    """A quantized weight: scale * code + minimum. Weights of experts have a first dimension of experts."""

    codes: Tensor  # [out_features, in_features]
    scales: Tensor  # [out_features, blocks] float32; the last block may be shorter
    mins: Tensor | None  # the same; None: zeros
    block_inputs: int  # number of consecutive inputs that share a scale
    bits: int  # 4 or 8; integers also 5 or 6
    order: Tensor | None = None  # [in_features], the layer's input of each column; None: the same order

    def dequantize(self) -> Tensor:
        """Return the weight [out_features, in_features] in float32, with the inputs in the layer's order."""
        values = E2M1[self.codes.long()] if self.codes.dtype == torch.uint8 else self.codes.float()
        if self.codes.shape[-1] == self.block_inputs * self.scales.shape[-1]:
            blocks, one = values.unflatten(-1, (-1, self.block_inputs)), (..., None)
            values = blocks.mul_(self.scales[one]) if self.mins is None else blocks * self.scales[one] + self.mins[one]
            values = values.flatten(-2)
        else:
            values = values * self._of_inputs(self.scales)
            if self.mins is not None:
                values += self._of_inputs(self.mins)
        return values if self.order is None else values[..., self.order.argsort()]

    def select(self, index: Tensor | slice | int) -> Blocks:
        """Return the weight of these outputs, or of one expert."""
        mins = None if self.mins is None else self.mins[index]
        return self._replace(codes=self.codes[index], scales=self.scales[index], mins=mins)

    def shard(self, rows: range, columns: range) -> Blocks | None:
        """Return the weight of these outputs and inputs, or None if the blocks of these inputs are not kept whole."""
        part = self.select(slice(rows.start, rows.stop))
        if len(columns) == self.codes.shape[-1]:
            return part
        if self.order is not None:
            return None
        size = math.gcd(self.block_inputs, columns.start) if self.scales.shape[-1] > 1 else self.block_inputs
        if size % 8:
            return None
        part = part.with_blocks_of(size)
        first, last = (0, 1) if self.scales.shape[-1] == 1 else (columns.start // size, -(-columns.stop // size))
        return part._replace(
            codes=part.codes[..., columns.start : columns.stop],
            scales=part.scales[..., first:last],
            mins=None if part.mins is None else part.mins[..., first:last],
        )

    def with_blocks_of(self, size: int) -> Blocks:
        """Return the same weight with smaller blocks, of which `block_inputs` must be a multiple."""
        blocks = -(-self.codes.shape[-1] // size)

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.block_inputs // size, -1)[..., :blocks]

        mins = None if self.mins is None else spread(self.mins)
        return self._replace(scales=spread(self.scales), mins=mins, block_inputs=size)

    def with_half_scales(self) -> Blocks:
        """Return the weight with scales and minima rounded to float16."""
        mins = None if self.mins is None else self.mins.half().float()
        return self._replace(scales=self.scales.half().float(), mins=mins)

    def pack(self, *, int8_rows: bool) -> Weight:
        """Return the weight in the layout of the CPU kernels.

        Scales and minima are stored in float16 if that does not change any of them, and otherwise in float32.

        int8_rows: round activations to 8 bits, except for FP8, where they are multiplied as they are.
        """
        fits = all(torch.equal(part.half().float(), part) for part in (self.scales, self.mins) if part is not None)
        dtype = torch.float16 if fits else torch.float32
        mins = None if self.mins is None else self.mins.to(dtype)
        packed = pack_quantized(self.codes, self.scales.to(dtype), mins, self.block_inputs, self.bits)
        copy = GroupedCopy(packed._replace(int8_rows=int8_rows and self.codes.dtype != torch.float8_e4m3fn))
        return copy if self.order is None else PermutedWeight(copy, self.order)

    def _of_inputs(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.block_inputs, -1)[..., : self.codes.shape[-1]]


def pack_joined(parts: Sequence[Blocks], *, int8_rows: bool) -> Weight:
    """Return the weight with the outputs of all parts in the layout of the CPU kernels.

    Parts that cannot be joined, because they have different kinds of codes or orders of inputs, are multiplied one
    after the other.
    """
    joined = join(parts)
    if joined is None:
        return JoinedWeight([part.pack(int8_rows=int8_rows) for part in parts])
    return joined.pack(int8_rows=int8_rows)


def join(parts: Sequence[Blocks]) -> Blocks | None:
    """Return the weight with the outputs of all parts. Its blocks are the smallest, and its codes the widest.

    Returns None if the parts have different kinds of codes or orders of inputs.
    """
    first, size = parts[0], math.gcd(*(part.block_inputs for part in parts))
    same_order = all(
        part.order is first.order
        or (part.order is not None and first.order is not None and torch.equal(part.order, first.order))
        for part in parts
    )
    if not same_order or any(part.codes.dtype != first.codes.dtype for part in parts) or size % 8:
        return None
    has_mins = any(part.mins is not None for part in parts)
    parts = [part.with_blocks_of(size) for part in parts]
    mins = [torch.zeros_like(part.scales) if part.mins is None else part.mins for part in parts]
    return Blocks(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(mins) if has_mins else None,
        size,
        max(part.bits for part in parts),
        first.order,
    )
