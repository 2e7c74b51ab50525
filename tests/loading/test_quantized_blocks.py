"""Quantized weights: their parts, joined and packed for the CPU kernels."""

import pytest
import torch
from torch.testing import assert_close

from paged_backend.loading.quantized_blocks import Blocks, join, pack_joined
from paged_backend.models.linear import JoinedWeight, PermutedWeight
from paged_kernels.cpu import native

needs_kernels = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")
ROWS, COLUMNS = 40, 96
ORDER = torch.arange(COLUMNS).flip(0)


def make_blocks(kind="int4", size=32, *, mins=False, order=None, dtype=torch.float16):
    """Return a random weight whose scales and minima are values of `dtype`."""
    torch.manual_seed(0)
    codes = {
        "int4": torch.randint(-8, 8, (ROWS, COLUMNS), dtype=torch.int8),
        "int8": torch.randint(-128, 128, (ROWS, COLUMNS)).to(torch.int8),
        "fp8": torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn),
        "fp4": torch.randint(16, (ROWS, COLUMNS), dtype=torch.uint8),
    }[kind]
    scales, lowest = torch.rand(2, ROWS, -(-COLUMNS // size)).to(dtype).float()
    return Blocks(codes, scales, lowest if mins else None, size, 8 if "8" in kind else 4, order)


@needs_kernels
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mins", [False, True])
def test_packing_loses_nothing(kind, dtype, mins):
    """The product with the identity is the weight, up to the rounding of its sum in float32."""
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    blocks = make_blocks(kind, mins=mins, dtype=dtype, order=order)
    packed = blocks.pack(int8_rows=False)
    assert isinstance(packed, PermutedWeight)
    assert packed.weight.packed.wide_scales == (dtype == torch.float32)
    assert_close(packed(torch.eye(COLUMNS), None).T, blocks.dequantize(), rtol=2e-7, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize(("kind", "rounds"), [("int4", True), ("int8", True), ("fp4", True), ("fp8", False)])
def test_activations_are_rounded_except_for_fp8(kind, rounds):
    assert make_blocks(kind).pack(int8_rows=True).packed.int8_rows == rounds


def test_scales_are_rounded_only_on_request():
    blocks = make_blocks(dtype=torch.float32, mins=True)
    rounded = blocks.with_half_scales()
    assert torch.equal(rounded.scales, blocks.scales.half().float())
    assert torch.equal(rounded.mins, blocks.mins.half().float())


def test_parts_of_different_formats_are_joined():
    parts = [make_blocks("int4", 32, mins=True), make_blocks("int8", 16), make_blocks("int4", COLUMNS)]
    joined = join(parts)
    assert (joined.block_inputs, joined.bits) == (16, 8)
    assert_close(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


@needs_kernels
@pytest.mark.parametrize("other", [make_blocks("fp8"), make_blocks(order=ORDER)], ids=["codes", "order"])
def test_other_parts_are_multiplied_one_after_the_other(other):
    parts = [make_blocks("int4", 32), other]
    assert join(parts) is None
    weight = pack_joined(parts, int8_rows=False)
    assert isinstance(weight, JoinedWeight)
    bias, plain = torch.randn(2 * ROWS), torch.cat([part.dequantize() for part in parts])
    assert_close(weight(torch.eye(COLUMNS), bias).T, plain + bias[:, None])


def test_parts_in_the_same_order_are_joined():
    parts = [make_blocks(order=ORDER), make_blocks(order=ORDER.clone())]
    assert_close(join(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_rows_are_selected():
    blocks = make_blocks(mins=True)
    rows = torch.tensor([3, 0])
    assert torch.equal(blocks.select(rows).dequantize(), blocks.dequantize()[rows])


@pytest.mark.parametrize(
    ("size", "columns", "part_size"),
    [(32, (32, 96), 32), (32, (48, 96), 16), (32, (48, 80), 16), (COLUMNS, (24, 96), COLUMNS), (32, (0, 96), 32)],
)
def test_shards(size, columns, part_size):
    blocks = make_blocks(size=size, mins=True)
    part = blocks.shard(range(5, 20), range(*columns))
    assert part.block_inputs == part_size
    assert torch.equal(part.dequantize(), blocks.dequantize()[5:20, slice(*columns)])


@pytest.mark.parametrize("blocks", [make_blocks(size=32), make_blocks(order=ORDER)], ids=["blocks", "order"])
def test_shards_that_split_a_block_are_refused(blocks):
    assert blocks.shard(range(ROWS), range(36, 72)) is None
