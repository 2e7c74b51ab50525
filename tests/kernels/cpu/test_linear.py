"""Linear layers in C++ at every level of this machine, against products in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from paged_kernels.cpu import native
from paged_kernels.cpu.native import linear, pack_linear

pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [
    *range(1, 18),
    24,
    31,
    33,
    64,
    65,
    130,
]  # one panel of each height, several panels, more rows than a thread processes at a time
NEAR = {
    torch.float32: dict(rtol=1e-5, atol=1e-4),
    torch.float16: dict(rtol=1e-3, atol=1e-4),
    torch.bfloat16: dict(rtol=8e-3, atol=1e-4),
}
SHAPES = [(1, 1), (16, 2), (5, 33), (17, 16), (70, 48), (80, 47), (129, 576)]  # [out_features, in_features]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", native.levels())
def test_product_for_any_number_of_rows(level, shape, dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    packed = pack_linear(weight)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        for added in (None, bias):
            found = linear(x, packed, added, level=level)
            expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
            assert_close(found, expected.to(dtype), **NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", native.levels())
def test_int8_weights_are_scaled_per_output(level, dtype):
    torch.manual_seed(0)
    codes, scales = torch.randint(-127, 128, (70, 33), dtype=torch.int8), torch.rand(70) / 127
    packed, bias = pack_linear(codes, scales), torch.randn(70).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, 33).to(dtype)
        expected = F.linear(x.double(), codes * scales[:, None].double(), bias.double())
        assert_close(linear(x, packed, bias, level=level), expected.to(dtype), **NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", native.levels())
def test_row_result_does_not_depend_on_other_rows(level, dtype):
    torch.manual_seed(0)
    x, packed = torch.randn(130, 96).to(dtype), pack_linear(torch.randn(200, 96).to(dtype))
    together = linear(x, packed, level=level)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], packed, level=level), together[:rows])
        assert torch.equal(linear(x[rows - 1 :], packed, level=level), together[rows - 1 :])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_number_of_threads_does_not_change_bits(threads):
    torch.manual_seed(0)
    x, packed = torch.randn(130, 96), pack_linear(torch.randn(500, 96))
    before, expected = torch.get_num_threads(), linear(x, packed)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x, packed), expected)
    finally:
        torch.set_num_threads(before)


def test_rows_may_have_any_shape_and_stride():
    torch.manual_seed(0)
    weight = torch.randn(40, 24)
    packed, wide = pack_linear(weight), torch.randn(6, 96)
    strided = [wide[:, 3:27], wide[:, ::4], wide[::2, 72:], wide.view(6, 2, 48)[:, 1, :24]]
    shaped = [torch.randn(24), torch.randn(2, 0, 24), torch.randn(0, 24), wide.view(6, 4, 24)]
    for x in [*strided, *shaped, torch.randn(3, 24, 5).transpose(1, 2)]:
        assert_close(linear(x, packed), F.linear(x, weight))


def test_mismatched_types_and_sizes_are_rejected():
    x, packed, bias = torch.randn(2, 24), pack_linear(torch.randn(40, 24)), torch.randn(40)
    codes, scales = torch.ones(40, 24, dtype=torch.int8), torch.rand(40)
    for rows, weight, added, message in (
        (x.bfloat16(), packed, None, "the weight and x have different types"),
        (torch.randn(2, 23), packed, None, "rows of 23 for a weight of 24 inputs"),
        (x, packed._replace(out_features=60), None, "a weight of 1152 elements for 24 inputs and 60 outputs"),
        (x, packed, bias[:39], "bias must be 40 dense elements of the right type"),
        (x, packed, bias.bfloat16(), "bias must be 40"),
        (x, packed, torch.randn(80)[::2], "bias must be 40"),
        (x, pack_linear(codes, scales[:39]), None, "scales must be 40"),
        (x, pack_linear(codes, scales.bfloat16()), None, "scales must be 40"),
        (x.to(torch.int8), pack_linear(codes, scales), None, "rows must be float32, float16 or bfloat16"),
        (x.to(torch.float8_e4m3fn), pack_linear(codes, scales), None, "rows must be float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            linear(rows, weight, added)
    with pytest.raises(ValueError, match="level=sse: this machine has"):
        linear(x, packed, level="sse")


def test_zero_inputs_give_the_bias():
    bias = torch.randn(40)
    assert torch.equal(linear(torch.randn(3, 0), pack_linear(torch.randn(40, 0)), bias), bias.expand(3, 40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nans_stay_in_their_rows(dtype):
    x, packed = torch.ones(20, 40, dtype=dtype), pack_linear(torch.ones(33, 40, dtype=dtype))
    x[3, 5], x[17, 39] = torch.inf, torch.nan
    found = linear(x, packed)
    assert found[3].eq(torch.inf).all() and found[17].isnan().all()
    assert found[[row for row in range(20) if row not in (3, 17)]].eq(40).all()
