"""Linear layers with one order of sums: against the reference, and bit by bit for any number of rows."""

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import layer_ops as module
from paged_kernels.cpu import pytorch
from paged_kernels.launch import Device
from paged_kernels.layer_ops import invariant_linear, invariant_linear_reference, tile_of
from tests.support.fixed_order_dot import create_dot
from tests.support.layer_cases import normal

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2}
SHAPES = [(1, 96, 64), (5, 300, 40), (70, 130, 150), (300, 64, 16)]  # rows, inputs, outputs
CHIPS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.fixture(autouse=True)
def fixed_order(monkeypatch, device):
    if device == "cpu":
        import triton.runtime.interpreter as interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def inputs(rows, width, outputs, dtype, device):
    x, weight, bias = (
        normal(*size, dtype=torch.float32, device=device, seed=seed).to(dtype)
        for seed, size in enumerate(((rows, width), (outputs, width), (outputs,)))
    )
    return x, weight / width**0.5, bias


@pytest.mark.parametrize("implementation", [invariant_linear, pytorch.invariant_linear])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape, dtype, implementation, device):
    x, weight, bias = inputs(*shape, dtype, "cpu" if implementation is pytorch.invariant_linear else device)
    for some in (None, bias):
        found, expected = implementation(x, weight, some), invariant_linear_reference(x, weight, some)
        assert found.dtype == dtype
        assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_bits_do_not_depend_on_the_number_of_rows(chip, dtype, device, monkeypatch):
    monkeypatch.setattr(module, "device_of", lambda device: Device(chip, 132))
    x, weight, bias = inputs(130, 200, 70, dtype, device)
    whole = invariant_linear(x, weight, bias)
    for rows in map(slice, (129, 122, 115, 97, 67, 65, 2, 0, 0), (130, 130, 130, 130, 130, 130, 130, 15, 64)):
        assert torch.equal(invariant_linear(x[rows], weight, bias), whole[rows]), rows


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("outputs", [64, 4096, 151936])
@pytest.mark.parametrize("chip", CHIPS)
def test_rows_only_affect_the_height_of_a_tile(chip, outputs, itemsize):
    """Tiles of outputs and steps of inputs are those of the weight. Stages and warps do not affect sums."""
    tiles = [tile_of(rows, outputs, itemsize, Device(chip, 132)) for rows in (1, 16, 17, 64, 65, 1000, 8192)]
    assert len({(tile.block_n, tile.block_k) for tile in tiles}) == 1


def test_any_strides(device):
    x, weight, _ = inputs(5, 96, 48, torch.float32, device)
    expected = invariant_linear(x, weight)
    assert torch.equal(invariant_linear(torch.stack((x, x), 1)[:, 0], weight), expected)
    assert torch.equal(invariant_linear(x.T.contiguous().T, weight.T.contiguous().T), expected)


def test_no_rows(device):
    assert invariant_linear(*inputs(0, 32, 16, torch.float32, device)).shape == (0, 16)
