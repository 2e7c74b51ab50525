"""Rounding of weights to 8 and 4 bits for the CPU kernels.

A block of consecutive inputs of one output shares a scale, and with 4 bits also a minimum:

    int8    weight = scale * code,             code -127..127
    int4    weight = scale * code + minimum,   code -8..7

Scales and minima are float16. For int4, two steps alternate: scale and minimum become the values that minimize the
squared error of a block, given its codes; then each code becomes the nearest to its weight, given both. They start from
codes for the whole range of a block, and once more from a narrower range. The result with the smaller error is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paged_backend.api.errors import ConfigError
from paged_kernels.cpu.packed_linear import PackedLinear, pack_quantized

CHUNK = 1 << 18  # number of weights that are rounded at a time, so that temporary values stay in the CPU cache
ITERATIONS = 4  # after which the error of int4 hardly decreases
NARROW = 0.9  # width of the second initial range, relative to the first one
LEVELS = 15  # number of steps between the least and the greatest code of 4 bits


class Quantizer(Protocol):
    """Replaces weights by quantized ones."""

    description: str  # "int8 weights"
    bits: int | None  # bits to which weights are rounded; None: the model has been quantized before
    int8_rows: bool  # whether activations are rounded to 8 bits before they are multiplied
    replaced: list[Tensor]  # weights that have been replaced

    def __call__(self, weight: Tensor) -> Any:
        """Return what takes the place of a weight [out_features, in_features], or the weight itself."""
        ...


class QuantizationSpec(NamedTuple):
    """How weights are rounded, from the engine options."""

    bits: int
    group_size: int | None  # number of inputs that share a scale; None: all
    int8_rows: bool  # whether activations are rounded to 8 bits, too


def quantize(weight: Tensor, bits: int, block_inputs: int | None) -> PackedLinear:
    """Round a weight [out_features, in_features] to 8 or 4 bits.

    Args:
        weight: any floating-point type.
        bits: 8 or 4.
        block_inputs: number of inputs that share a scale, a multiple of 8; None: all inputs of an output.

    Raises ConfigError if the scales exceed float16. Blocks whose largest weight is below 4e-6 (int8) become 0.
    """
    size = block_inputs or -(-weight.shape[1] // 8) * 8
    rounded = [(_round_to_int8 if bits == 8 else _round_to_int4)(blocks) for blocks in _blocks(weight, size)]
    codes = torch.cat([chunk.codes for chunk in rounded]).flatten(1)[:, : weight.shape[1]]
    scales = torch.cat([chunk.scales for chunk in rounded])
    mins = [chunk.mins for chunk in rounded if chunk.mins is not None]
    if not all(part.isfinite().all() for part in (scales, *mins)):
        largest = float(weight.abs().max())
        raise ConfigError(
            f"quantization cannot round weights up to {largest:g} to {bits} bits: the scales exceed float16"
        )
    return pack_quantized(codes, scales, torch.cat(mins) if mins else None, size, bits)


def _blocks(weight: Tensor, size: int) -> Iterator[Tensor]:
    """Yield float32 tensors [outputs, blocks, size], each of some of the outputs. A short last block is filled with its
    last weight."""
    for rows in weight.split(max(1, CHUNK // weight.shape[1])):
        missing = -rows.shape[1] % size
        yield torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1).float().unflatten(1, (-1, size))


class _Rounded(NamedTuple):
    codes: Tensor  # [outputs, blocks, size] int8
    scales: Tensor  # [outputs, blocks] float16
    mins: Tensor | None  # the same


def _round_to_int8(blocks: Tensor) -> _Rounded:
    scales = (blocks.abs().amax(-1) / 127).half()
    return _Rounded(_codes(blocks, scales.float(), torch.zeros(()), -127, 127), scales, None)


def _round_to_int4(blocks: Tensor) -> _Rounded:
    lowest, highest = blocks.aminmax(dim=-1)
    best = _fit_int4(blocks, lowest, highest)
    margin = (highest - lowest) * (1 - NARROW) / 2
    other = _fit_int4(blocks, lowest + margin, highest - margin)
    is_better = _squared_error(blocks, other) < _squared_error(blocks, best)
    return _Rounded(
        torch.where(is_better[..., None], other.codes, best.codes),
        torch.where(is_better, other.scales, best.scales),
        torch.where(is_better, other.mins, best.mins),
    )


def _fit_int4(blocks: Tensor, lowest: Tensor, highest: Tensor) -> _Rounded:
    """Alternate the two steps, from codes that are evenly spaced over this range."""
    scales = (highest - lowest) / LEVELS
    mins = lowest + 8 * scales  # weights of the code 0, which is in the middle
    for _ in range(ITERATIONS):
        codes = _codes(blocks, scales, mins, -8, 7).float()
        mean, mean_code = blocks.mean(-1), codes.mean(-1)
        spread = (codes * codes).mean(-1) - mean_code**2
        fitted = ((codes * blocks).mean(-1) - mean_code * mean) / spread
        scales = torch.where(spread > 0, fitted, scales)
        mins = mean - scales * mean_code
    halves = scales.half(), mins.half()
    return _Rounded(_codes(blocks, halves[0].float(), halves[1].float(), -8, 7), *halves)


def _squared_error(blocks: Tensor, rounded: _Rounded) -> Tensor:
    assert rounded.mins is not None
    scales, mins = rounded.scales.float()[..., None], rounded.mins.float()[..., None]
    return (rounded.codes * scales + mins - blocks).square_().sum(-1)


def _codes(blocks: Tensor, scales: Tensor, mins: Tensor, lowest: int, highest: int) -> Tensor:
    inverse = torch.where(scales > 0, 1 / scales, 0)
    return ((blocks - mins[..., None]) * inverse[..., None]).round_().clamp_(lowest, highest).to(torch.int8)
