"""Quantization of a row: error bounds of the formats, rounding, values that are not finite, and reading back."""

import pytest
import torch
from torch import Tensor

from paged_kernels.kv_write import kv_write
from paged_kernels.layer_cache import FORMATS, MAX_CODE, LayerCache, dequantize, quantize
from paged_kernels.paged_attention import paged_attention
from tests.support.attention_cases import Case, make_inputs


def rows() -> Tensor:
    """Make rows [rows, head_dim]: normal, of all magnitudes within or between rows, and with one nonzero element."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn((4, 500, 64), generator=generator)
    drawn[1] *= torch.exp2(torch.randint(-20, 20, drawn[1].shape, generator=generator))
    drawn[2] *= torch.exp2(torch.randint(-90, 100, (500, 1), generator=generator))
    drawn[3, :, 1:] = 0
    return drawn.flatten(0, 1)


def round_trip(x: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = quantize(x, dtype)
    return dequantize(codes, scales, torch.empty_like(x, dtype=torch.float32))


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
def test_quantization_error_is_within_the_bound_of_the_format(dtype):
    x = rows()
    top = x.abs().amax(dim=-1, keepdim=True)
    bound = top / 254 if dtype == torch.int8 else torch.maximum(x.abs() / 16, top / 458752)
    error = (round_trip(x, dtype).double() - x.double()).abs()
    assert (error <= bound.double() * (1 + 1e-5)).all()
    assert error.amax() > 0
    largest = (x.abs() == top).expand_as(x)
    assert (error[largest] <= 1e-6 * x.double().abs()[largest]).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
def test_codes_are_the_nearest_with_ties_to_even(dtype):
    """Compare with a search over all codes of the format, on a grid with every tie."""
    every = torch.arange(-128, 128, dtype=torch.int8).view(dtype).float()
    every = every[every.abs() <= MAX_CODE[dtype]].unique()
    x = torch.cat([every, (every[1:] + every[:-1]) / 2])
    codes, scale = quantize(x, dtype)
    assert scale == 1
    distance = (codes.float() - x).abs()
    assert torch.equal(distance, (x[:, None] - every).abs().amin(dim=1))
    ties = codes[len(every) :]
    assert (ties.view(torch.int8) % 2 == 0).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=FORMATS.get)
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_finite_rows_stay_finite_and_others_become_nan(dtype, of):
    limits = torch.finfo(of)
    x = torch.randn(6, 8).to(of)
    x[0], x[2] = 0, limits.smallest_normal
    x[1] = limits.max * (1 - 2**-20)  # in fp32 the largest number itself might be rounded up to infinity
    finite = round_trip(x, dtype)
    assert finite.isfinite().all()
    assert not finite[0].any()
    assert (quantize(x, dtype)[1] >= torch.finfo(torch.float32).smallest_normal).all()
    torch.testing.assert_close(finite[1], x[1].float())
    x[3, 0], x[4, 7], x[5, 2] = float("nan"), float("inf"), float("-inf")
    spoilt = round_trip(x, dtype)
    assert torch.equal(spoilt[:3], finite[:3])
    assert spoilt[3:].isnan().all()
    assert quantize(x, dtype)[1].isnan().tolist() == [False] * 3 + [True] * 3


def test_written_value_is_read_back(device):
    """Attention with one visible key returns the value of that key."""
    for dtype in FORMATS:
        pools = [torch.zeros(2, 1, 4, 64).to(device, dtype) for _ in range(2)]
        cache = LayerCache(*pools, *(torch.zeros(2, 1, 4, device=device) for _ in range(2)))
        _, _, paging = make_inputs(Case("decode"), torch.float32, device).arrays
        alone = type(paging)(
            torch.tensor([4], device=device),
            torch.ones((1, 1), dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            max_query_len=1,
            max_context_len=1,
        )
        value = torch.randn(1, 1, 64, device=device)
        kv_write(value, value, cache, alone.slots)
        found = paged_attention(value, cache, alone, scale=1.0)
        torch.testing.assert_close(found[0].cpu(), round_trip(value[0].cpu(), dtype))
