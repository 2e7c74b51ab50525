"""Quantized weights of GGUF files as codes, scales and minima.

ggml (https://github.com/ggml-org/ggml) defines the formats: a row is a sequence of blocks of 32 weights, or of 256 for
the formats in "K", whose blocks have a float16 scale for the scales of 16 or 32 weights each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paged_backend.loading.quantized_blocks import Blocks


def decode(data: Tensor, name: str) -> Blocks | None:
    """Return the weight that a tensor of a GGUF file holds, or None if its format is not supported.

    Args:
        data: [out_features, bytes] uint8.
        name: the format in ggml's spelling, like "Q4_K".
    """
    if name not in FORMATS:
        return None
    size, read = FORMATS[name]
    rows, blocks = len(data), data.unflatten(1, (-1, size))  # [out_features, blocks, size]
    codes, scales, mins, bits = read(blocks)
    block_inputs = codes.shape[-1]
    return Blocks(
        codes.reshape(rows, -1),
        scales.float().reshape(rows, -1),
        None if mins is None else mins.float().reshape(rows, -1),
        block_inputs,
        bits,
    )


# What the functions below return: codes [..., block_inputs] int8, scales and mins [...], bits.
_Read = tuple[Tensor, Tensor, "Tensor | None", int]


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return a float16 of each block, [rows, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """Return the lower halves of all bytes, then the upper halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Return codes of up to 7 bits as int8, minus the code that means zero."""
    return codes.view(torch.int8) - zero


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return bit 4 of 32 codes from 4 bytes."""
    bits = (blocks[..., start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> _Read:
    return _signed(_nibbles(blocks[..., 2:]), 8), _half(blocks, 0), None, 4


def _q4_1(blocks: Tensor) -> _Read:
    scales = _half(blocks, 0)
    return _signed(_nibbles(blocks[..., 4:]), 8), scales, _half(blocks, 2) + 8 * scales, 4


def _q5_0(blocks: Tensor) -> _Read:
    return _signed(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2), 16), _half(blocks, 0), None, 5


def _q5_1(blocks: Tensor) -> _Read:
    scales = _half(blocks, 0)
    return _signed(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), 16), scales, _half(blocks, 2) + 16 * scales, 5


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None, 8


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minima of each block of Q4_K and Q5_K, [rows, blocks, 8]."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scales * _half(blocks, 0)[..., None], -(mins * _half(blocks, 2)[..., None])


def _q4_k(blocks: Tensor) -> _Read:
    scales, mins = _six_bit_scales(blocks)
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return _signed(codes, 8), scales, mins + 8 * scales, 4


def _q5_k(blocks: Tensor) -> _Read:
    scales, mins = _six_bit_scales(blocks)
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    fifth = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _signed(codes | fifth << 4, 16), scales, mins + 16 * scales, 5


def _q6_k(blocks: Tensor) -> _Read:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = _nibbles(low).unflatten(-1, (4, 32)) | high << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _half(blocks, 208)[..., None]
    return _signed(codes.flatten(-3).unflatten(-1, (16, 16)), 32), scales, None, 6


FORMATS: Mapping[str, tuple[int, Callable[[Tensor], _Read]]] = {  # bytes of a block, and its decoder
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
