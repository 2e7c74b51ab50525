"""Weights rounded to 8 and 4 bits."""

import re

import pytest
import torch

from paged_backend.api.errors import ConfigError
from paged_backend.models.quantization import quantize
from paged_kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


def dequantized(packed):
    return native.linear(torch.eye(packed.in_features), packed).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 32, 128])
def test_int8_rounding_error_is_about_half_a_step(dtype, group_size):
    torch.manual_seed(0)
    weight = torch.randn(70, 300).to(dtype) * torch.logspace(-2, 3, 70)[:, None].to(dtype)
    weight[7] = 0
    weight[9, :64] = 0
    rounded = dequantized(quantize(weight, 8, group_size))
    for start in range(0, 300, group_size or 300):
        group = slice(start, start + (group_size or 300))
        half_a_step = weight[:, group].float().abs().amax(1, keepdim=True) / 127 / 2
        assert ((rounded - weight.float())[:, group].abs() <= half_a_step * 1.13).all()  # float16 scales
    assert not torch.equal(rounded, weight.float())


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_error_is_below_that_of_evenly_spaced_codes(group_size):
    torch.manual_seed(0)
    weight = torch.randn(70, 600)
    weight[7] = 0
    weight[9] = 3.5
    error = (dequantized(quantize(weight, 4, group_size)) - weight).square().mean()
    groups = torch.nn.functional.pad(weight, (0, -600 % group_size)).unflatten(1, (-1, group_size))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    step = (highest - lowest).clamp_min(1e-9) / 15
    even = ((groups - lowest) / step).round() * step + lowest
    assert error < 0.95 * (even - groups).flatten(1)[:, :600].square().mean()


def test_int4_rounds_heavy_tails_well():
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(5.0).sample((300, 896))
    error = (dequantized(quantize(weight, 4, 32)) - weight).square().mean()
    groups = weight.unflatten(1, (-1, 32))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    step = (highest - lowest) / 15
    even = ((groups - lowest) / step).round() * step + lowest
    assert error < 0.845 * (even - groups).square().mean()


def test_int4_is_exact_for_weights_of_16_values():
    weight = torch.randint(0, 16, (40, 96)) * 0.25 - 1.5
    weight[:, ::32], weight[:, 1::32] = -1.5, 2.25
    assert torch.equal(dequantized(quantize(weight, 4, 32)), weight)


def test_groups_that_are_larger_than_the_weight():
    weight = torch.randn(20, 24)
    assert torch.allclose(dequantized(quantize(weight, 8, 128)), weight, atol=0.03)


@pytest.mark.parametrize(("bits", "largest"), [(8, 1e7), (4, 1e6), (4, float("nan"))])
def test_weights_beyond_the_scales_are_rejected(bits, largest):
    weight = torch.randn(16, 64)
    weight[3, 5] = largest
    with pytest.raises(
        ConfigError, match=re.escape(f"weights up to {largest:g} to {bits} bits: the scales exceed float16")
    ):
        quantize(weight, bits, 32)
