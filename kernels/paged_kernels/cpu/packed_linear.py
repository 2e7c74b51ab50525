"""Weights of linear layers in the layout of the C++ kernels."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.cpu.huge_pages import HugePageAllocator

GROUP = 16  # number of outputs whose weights are stored together
INT4_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the inputs of a step in 32 bits, from the lowest 4 bits on
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # values of the codes of FP4

_weights = HugePageAllocator()


class PackedLinear(NamedTuple):
    """The weight of a linear layer in the layout of `native.linear`: groups of 16 outputs, padded with zeros.

    [groups, in_features, 16]; for bfloat16, in pairs of inputs, [groups, in_features / 2, 16, 2]; for int8, in steps of
    4 inputs, [groups, in_features / 4, 16, 4]; for codes of 4 bits, in steps of 8 inputs, [groups, in_features / 8, 16]
    int32, or for FP4 [groups, in_features / 8, 16 * 4] float4_e2m1fn_x2.
    """

    groups: Tensor
    in_features: int
    out_features: int
    scales: Tensor | None = None  # [groups, blocks, 16] float16 or float32, for a quantized weight
    mins: Tensor | None = None  # the same, for a quantized weight with minima
    block_inputs: int = 0  # number of inputs that share a scale
    int8_rows: bool = False  # whether rows are rounded to 8 bits (`round_rows`); not for FP8


def pack_linear(weight: Tensor) -> PackedLinear:
    """Pack a weight [out_features, in_features] in float32, float16 or bfloat16."""
    groups = _pack_groups(weight, 2 if weight.dtype == torch.bfloat16 else 1, multiple=2)
    return PackedLinear(groups, weight.shape[1], len(weight))


def pack_quantized(codes: Tensor, scales: Tensor, mins: Tensor | None, block_inputs: int, bits: int) -> PackedLinear:
    """Pack a quantized weight: scale * code, plus a minimum if there are any.

    Args:
        codes: [out_features, in_features] int8 (with 4 bits they must be -8..7), with 8 bits float8_e4m3fn without NaN,
            or with 4 bits uint8, which are the indices of `E2M1`.
        scales, mins: [out_features, blocks], both float16 or both float32.
        block_inputs: the number of inputs that share a scale, a multiple of 8; the last block may be shorter.
        bits: 4 or 8.
    """
    out_features, in_features = codes.shape
    if bits == 4:
        digits = codes if codes.dtype == torch.uint8 else (codes + 8).view(torch.uint8)
        zero = 0 if codes.dtype == torch.uint8 else 8
        padded = F.pad(digits, (0, -in_features % 8, 0, -out_features % GROUP), value=zero)
        in_order = padded.unflatten(1, (-1, 8))[..., INT4_ORDER].unflatten(-1, (4, 2))  # [outputs, steps, 4, 2]
        packed_bytes = in_order[..., 0] | in_order[..., 1] << 4
        groups = _weights.copy(packed_bytes.view(torch.int32).view(-1, GROUP, in_order.shape[1]).transpose(1, 2))
        if codes.dtype == torch.uint8:
            groups = groups.view(torch.uint8).view(torch.float4_e2m1fn_x2)
    else:
        together, multiple = (4, 4) if codes.dtype == torch.int8 else (1, 2)
        groups = _pack_groups(codes.view(torch.int8), together, multiple=multiple).view(codes.dtype)
    packed_mins = None if mins is None else _pack_groups(mins, 1)
    return PackedLinear(groups, in_features, out_features, _pack_groups(scales, 1), packed_mins, block_inputs)


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


def _pack_groups(rows: Tensor, together: int, *, multiple: int = 1) -> Tensor:
    """Return [groups, columns / together, 16] or [..., together], with columns padded to a multiple."""
    padded = F.pad(rows, (0, -rows.shape[1] % multiple, 0, -rows.shape[0] % GROUP))
    groups = padded.view(len(padded) // GROUP, GROUP, padded.shape[1] // together, together).transpose(1, 2)
    return _weights.copy(groups)
