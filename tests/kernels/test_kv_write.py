"""kv_write, in the interpreter, on a GPU and on a CPU, against the reference."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.kv_write import kv_write as kv_write_cpu
from kernels.kv_write import kv_write, kv_write_reference

# num_kv_heads, head_dim, block_size
SHAPES = [(1, 8, 1), (3, 64, 16), (2, 80, 8), (1, 72, 256), (32, 128, 2), (5, 256, 32)]


def make_inputs(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str, strided: bool
) -> list[Tensor]:
    """Nine tokens for random slots, two of them padding; strided: slices of a joint row and a joint pool."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn((9, 2, num_kv_heads, head_dim), generator=generator).to(device, dtype)
    pool = torch.zeros((16, 2, num_kv_heads, block_size, head_dim), dtype=dtype, device=device)
    slots = torch.randperm(16 * block_size, generator=generator)[:9].index_fill(0, torch.tensor([2, 8]), -1)
    tensors = [packed[:, 0], packed[:, 1], pool[:, 0], pool[:, 1]]
    return [*(tensors if strided else [t.contiguous() for t in tensors]), slots.to(device)]


def check(write, shape: tuple[int, int, int], dtype: torch.dtype, device: str, strided: bool) -> None:
    expected, actual = (make_inputs(*shape, dtype, device, strided) for _ in range(2))
    kv_write_reference(*expected)
    write(*actual)
    assert expected[2].any()
    assert torch.equal(actual[2], expected[2])
    assert torch.equal(actual[3], expected[3])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_matches_reference(shape, dtype, strided, device):
    check(kv_write, shape, dtype, device, strided)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_matches_reference(shape, dtype, strided):
    check(kv_write_cpu, shape, dtype, "cpu", strided)


@pytest.mark.parametrize("write", [kv_write_cpu, kv_write_reference])
def test_nothing_to_write(write):
    key, value, key_cache, value_cache, slots = make_inputs(2, 8, 4, torch.float32, "cpu", False)
    write(key, value, key_cache, value_cache, torch.full_like(slots, -1))
    write(key[:0], value[:0], key_cache, value_cache, slots[:0])
    assert not key_cache.any()
    assert not value_cache.any()
