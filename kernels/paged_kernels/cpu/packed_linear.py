"""Weights of linear layers in the layout of the C++ kernels."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.cpu.huge_pages import request_huge_pages

GROUP = 16  # number of outputs whose weights are stored together
INT4_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the inputs of a step in 32 bits, from the lowest 4 bits on
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # values of the codes of FP4


class PackedLinear(NamedTuple):
    """The weight of a linear layer in the layout of `native.linear`: groups of 16 outputs, padded with zeros.

    [groups, in_features, 16]; for bfloat16, in pairs of inputs, [groups, in_features / 2, 16, 2]; for codes of 4 bits,
    in steps of 8 inputs, [groups, in_features / 8, 16] int32, or for FP4 [groups, in_features / 8, 16 * 4]
    float4_e2m1fn_x2.
    """

    groups: Tensor
    in_features: int
    out_features: int
    scales: Tensor | None = None  # [groups, blocks, 16] float16 or float32, for a quantized weight
    mins: Tensor | None = None  # the same, for a quantized weight with minima
    block_inputs: int = 0  # number of inputs that share a scale


def pack_linear(weight: Tensor) -> PackedLinear:
    """Pack a weight [out_features, in_features] in float32, float16 or bfloat16."""
    return PackedLinear(_pack_groups(weight, 2 if weight.dtype == torch.bfloat16 else 1), weight.shape[1], len(weight))


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
        groups = _in_huge_pages(packed_bytes.view(torch.int32).view(-1, GROUP, in_order.shape[1]).transpose(1, 2))
        if codes.dtype == torch.uint8:
            groups = groups.view(torch.uint8).view(torch.float4_e2m1fn_x2)
    else:
        groups = _pack_groups(codes.view(torch.int8), 1).view(codes.dtype)
    packed_mins = None if mins is None else _pack_groups(mins, 1, even=False)
    return PackedLinear(
        groups, in_features, out_features, _pack_groups(scales, 1, even=False), packed_mins, block_inputs
    )


def _pack_groups(rows: Tensor, pair: int, *, even: bool = True) -> Tensor:
    padded = F.pad(rows, (0, rows.shape[1] % 2 if even else 0, 0, -rows.shape[0] % GROUP))
    groups = padded.view(len(padded) // GROUP, GROUP, padded.shape[1] // pair, pair).transpose(1, 2)
    return _in_huge_pages(groups)


def _in_huge_pages(values: Tensor) -> Tensor:
    """Return a dense copy."""
    copy = torch.empty_like(values, memory_format=torch.contiguous_format)
    request_huge_pages(copy)
    return copy.copy_(values)
