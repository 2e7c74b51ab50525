"""kv_write against the reference: in the interpreter, on a GPU and on a CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from paged_kernels.cpu import native
from paged_kernels.cpu.pytorch import kv_write as kv_write_cpu
from paged_kernels.kv_write import kv_write, kv_write_reference
from paged_kernels.layer_cache import FORMATS, LayerCache
from tests.support.attention_cases import make_cache
from tests.support.pairwise import pairwise

# num_kv_heads, head_dim, block_size
SHAPES = [(1, 8, 1), (3, 64, 16), (2, 80, 8), (1, 72, 256), (32, 128, 2), (5, 256, 32)]
COMPILED = [partial(native.kv_write, level=level) for level in native.levels()]
ANY_FORMAT = [None, *FORMATS.values()]


LATENT = [(1, 576, 16), (2, 24, 4)]


def make_inputs(
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    strided: bool,
    format: str | None,
) -> tuple[Tensor, Tensor, LayerCache, Tensor]:
    """Make nine tokens with random slots, two of them padding, with elements of every size, zeros, NaN and infinities.

    strided: slices of a joint row and a joint pool.
    """
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn((9, 2, num_kv_heads, head_dim), generator=generator)
    packed *= torch.exp2(torch.randint(-12, 4, packed.shape, generator=generator))
    packed[1, 0], packed[3, 0, 0, 1:], packed[4, 1, 0, :2] = 0, 1e-8, -0.0
    packed[5, 0, 0, 3], packed[6, 1, 0, 0], packed[7, 1, 0, 4] = float("nan"), float("inf"), float("-inf")
    packed = packed.to(device, dtype)
    pool = torch.zeros((16, 2, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
    slots = torch.randperm(16 * block_size, generator=generator)[:9].index_fill(0, torch.tensor([2, 8]), -1)
    key, value = (half if strided else half.contiguous() for half in packed.unbind(1))
    return key, value, make_cache(pool, format, strided=strided), slots.to(device)


def check(
    write,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    strided: bool,
    format: str | None,
    reference=kv_write_reference,
):
    """Require the same bits: a block does not depend on the implementation that wrote it."""
    expected, actual = (make_inputs(*shape, dtype, device, strided, format) for _ in range(2))
    reference(*expected)
    write(*actual)
    assert expected[2].keys.float().any()
    for one, other in zip(actual[2].tensors, expected[2].tensors, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("shape", "dtype", "strided", "format"),
    pairwise(SHAPES, [torch.float32, torch.float16], [False, True], ANY_FORMAT),
    ids=str,
)
def test_triton_matches_reference(shape, dtype, strided, format, device):
    check(kv_write, shape, dtype, device, strided, format)


@pytest.mark.parametrize(
    ("shape", "dtype", "strided", "format"),
    pairwise(SHAPES, [torch.float32, torch.float16, torch.bfloat16], [False, True], ANY_FORMAT),
    ids=str,
)
def test_cpu_matches_reference(shape, dtype, strided, format):
    for write in (kv_write_cpu, *COMPILED):
        check(write, shape, dtype, "cpu", strided, format)


def without_values(write, value_dim: int):
    """Return a write of keys only, to a cache whose values are the first `value_dim` elements of its keys."""

    def write_keys(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        shared = LayerCache.latent(cache.keys, value_dim, cache.key_scales)
        assert len(shared.tensors) == len(cache.tensors) / 2
        write(key, None, shared, slots)
        assert shared.values.data_ptr() == cache.keys.data_ptr()

    return write_keys


def with_shorter_values(write, value_dim: int):
    """Return a write of values of another size than keys."""

    def write_both(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        values = cache.values[..., :value_dim].contiguous()
        write(key, value[..., :value_dim], replace(cache, values=values), slots)
        cache.values.zero_()
        cache.values[..., :value_dim] = values

    return write_both


@pytest.mark.parametrize("format", ANY_FORMAT)
@pytest.mark.parametrize("shape", LATENT, ids=str)
@pytest.mark.parametrize("changed", [without_values, with_shorter_values])
def test_other_values_match_reference(changed, shape, format, device):
    """Values that are part of the keys, and values that are shorter than keys."""
    value_dim = shape[1] * 8 // 9
    reference = changed(kv_write_reference, value_dim)
    for dtype in (torch.float32, torch.float16):
        check(changed(kv_write, value_dim), shape, dtype, device, False, format, reference)
        for write in (kv_write_cpu, *COMPILED):
            check(changed(write, value_dim), shape, dtype, "cpu", False, format, reference)


@pytest.mark.parametrize("format", ANY_FORMAT)
@pytest.mark.parametrize("write", [kv_write_cpu, kv_write_reference, *COMPILED])
def test_nothing_to_write(write, format):
    key, value, cache, slots = make_inputs(2, 8, 4, torch.float32, "cpu", False, format)
    before = [tensor.clone() for tensor in cache.tensors]
    write(key, value, cache, torch.full_like(slots, -1))
    write(key[:0], value[:0], cache, slots[:0])
    assert all(torch.equal(*pair) for pair in zip(cache.tensors, before, strict=True))
