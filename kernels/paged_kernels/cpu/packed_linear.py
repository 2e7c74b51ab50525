"""Weights of linear layers in the layout of the C++ kernels."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.cpu.huge_pages import HugePageAllocator

GROUP = 16  # number of outputs whose weights are stored together
INT4_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the inputs of a step in 32 bits, from the lowest 4 bits on
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # values of the codes of FP4
KINDS = ("plain", "int8", "int4", "fp8", "fp4", "int5", "int6")  # of codes, in the order of Format in calls.h
STEPS = {"int8": 4, "int4": 8, "fp8": 2, "fp4": 8, "int5": 32, "int6": 16}  # inputs that are stored together

_weights = HugePageAllocator()


class PackedLinear(NamedTuple):
    """The weight of a linear layer in the layout of `native.linear`: groups of 16 outputs, padded with zeros.

    A plain weight is [groups, in_features, 16]; in bfloat16, in pairs of inputs, [groups, in_features / 2, 16, 2]. A
    quantized weight is [groups, bytes] uint8: for each block of inputs the scales of the outputs, their minima if there
    are any, and the codes in steps (csrc/weights.h).
    """

    groups: Tensor
    in_features: int
    out_features: int
    kind: str = "plain"  # of codes, one of KINDS
    block_inputs: int = 0  # number of inputs that share a scale
    wide_scales: bool = False  # whether scales and minima are in float32, otherwise float16
    has_mins: bool = False
    int8_rows: bool = False  # whether rows are rounded to 8 bits (`round_rows`); not for FP8

    @property
    def layout(self) -> list[int]:
        """The numbers by which the C++ operators read `groups`."""
        return [KINDS.index(self.kind), self.block_inputs, self.wide_scales, self.has_mins, self.int8_rows]


def pack_linear(weight: Tensor) -> PackedLinear:
    """Pack a weight [out_features, in_features] in float32, float16 or bfloat16."""
    groups = _group(weight, 2 if weight.dtype == torch.bfloat16 else 1, multiple=2)
    return PackedLinear(_weights.copy(groups), weight.shape[1], len(weight))


def pack_quantized(codes: Tensor, scales: Tensor, mins: Tensor | None, block_inputs: int, bits: int) -> PackedLinear:
    """Pack a quantized weight: scale * code, plus a minimum if there are any.

    Args:
        codes: [out_features, in_features] int8 from -2**(bits - 1) to 2**(bits - 1) - 1, with 8 bits float8_e4m3fn
            without NaN, or with 4 bits uint8, which are the indices of `E2M1`.
        scales, mins: [out_features, blocks], both float16 or both float32.
        block_inputs: the number of inputs that share a scale, a multiple of 8; the last block may be shorter.
        bits: 4, 5, 6 or 8. Codes of 5 bits are stored in 8 bits unless `block_inputs` is a multiple of 32, and codes of
            6 bits unless it is a multiple of 16.
    """
    kind = {torch.int8: f"int{bits}", torch.uint8: "fp4"}.get(codes.dtype, "fp8")
    if block_inputs % max(8, STEPS[kind]):
        kind = "int8"
    step, blocks = STEPS[kind], scales.shape[1]
    packed = _PACKERS[kind](F.pad(codes.view(torch.uint8), (0, -codes.shape[1] % step, 0, -len(codes) % GROUP)))
    used = packed.shape[1]  # steps; the last block may have fewer than the others
    packed = F.pad(packed.flatten(2), (0, 0, 0, blocks * (block_inputs // step) - used))
    headers = [_group(part, 1).contiguous().view(torch.uint8).flatten(2) for part in (scales, mins) if part is not None]
    joined = torch.cat([*headers, packed.unflatten(1, (blocks, -1)).flatten(2)], 2).flatten(1)
    excess = packed.shape[2] * (packed.shape[1] - used)
    groups = _weights.copy(joined[:, : joined.shape[1] - excess])
    wide = scales.dtype == torch.float32
    return PackedLinear(groups, codes.shape[1], len(codes), kind, block_inputs, wide, mins is not None)


def round_rows(x: Tensor, block_inputs: int) -> Tensor:
    """Return rows [..., in_features] as `native.linear` multiplies them by a weight with `int8_rows`, in float32.

    Consecutive inputs share a scale, their largest magnitude / 127, and become the nearest integers (ties to even): 32
    inputs, or 16 or 8 if `block_inputs`, the number of inputs that share a scale of the weight, is not a multiple.
    Inputs that share a scale with an infinity or NaN become NaN.
    """
    size = math.gcd(32, block_inputs)
    segments = F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    largest = segments.abs().amax(-1, keepdim=True)
    scales = torch.where(largest.isfinite(), largest.clamp_min(2.0**-100) / 127, torch.nan)
    return ((segments / scales).round() * scales).flatten(-2)[..., : x.shape[-1]]


def _group(rows: Tensor, together: int, *, multiple: int = 1) -> Tensor:
    """Return a view [groups, columns / together, 16, together] of rows, with columns padded to a multiple."""
    padded = F.pad(rows, (0, -rows.shape[1] % multiple, 0, -rows.shape[0] % GROUP))
    return padded.view(len(padded) // GROUP, GROUP, padded.shape[1] // together, together).transpose(1, 2)


# The functions below return the steps of codes [out_features, in_features] uint8, [groups, steps, ...].


def _pack_4_bits(codes: Tensor) -> Tensor:
    in_order = codes.unflatten(1, (-1, 8))[..., INT4_ORDER].unflatten(-1, (4, 2))  # [outputs, steps, 4, 2]
    return _group((in_order[..., 0] | in_order[..., 1] << 4).flatten(1), 4)


def _pack_planes(codes: Tensor, bits: int) -> Tensor:
    fours = codes.unflatten(1, (-1, STEPS[f"int{bits}"] // 4, 4))  # [outputs, steps, fours, 4]
    high = torch.zeros_like(fours[:, :, 0])
    for number, four in enumerate(fours.unbind(2)):
        high |= four >> 4 << number * (bits - 4)
    low = fours[:, :, 0::2] & 15 | fours[:, :, 1::2] << 4
    step = torch.cat([high[:, :, None], low], 2)  # [outputs, steps, 1 + fours / 2, 4]
    return step.unflatten(0, (-1, GROUP)).permute(0, 2, 3, 1, 4)


_PACKERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda codes: _group(codes, 4),
    "fp8": lambda codes: _group(codes, 1).unflatten(1, (-1, 2)),
    "int4": lambda codes: _pack_4_bits(codes + 8 & 15),
    "fp4": _pack_4_bits,
    "int5": lambda codes: _pack_planes(codes + 16 & 31, 5),
    "int6": lambda codes: _pack_planes(codes + 32 & 63, 6),
}
