"""Linear layers in C++ at every level of this machine, against products in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from paged_kernels.cpu import native
from paged_kernels.cpu.native import linear
from paged_kernels.cpu.packed_linear import pack_linear, pack_quantized, round_rows
from tests.support.pairwise import pairwise
from tests.support.quantized_weights import make_parts, make_quantized

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
    270,
]  # one panel of each height, several panels, more rows than a thread processes at a time
NEAR = {
    torch.float32: dict(rtol=1e-5, atol=1e-4),
    torch.float16: dict(rtol=1e-3, atol=1e-4),
    torch.bfloat16: dict(rtol=8e-3, atol=1e-4),
}
SHAPES = [(1, 1), (16, 2), (5, 33), (17, 16), (70, 48), (80, 47), (129, 576), (33, 700)]  # [out_features, in_features]


@pytest.mark.parametrize(("level", "shape", "dtype"), pairwise(native.levels(), SHAPES, DTYPES), ids=str)
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


QUANTIZED = [  # bits, number of inputs that share a scale, whether there are minima, kind of codes, type of scales
    (8, 576, False),
    (8, 32, False),
    (8, 16, True),
    (4, 32, False),
    (4, 32, True),
    (4, 128, True),
    (5, 32, False),
    (5, 64, True),
    (5, 16, False),  # stored in 8 bits
    (6, 16, False),
    (6, 32, True, "int", torch.float32),
    (6, 8, True),  # stored in 8 bits
    (8, 128, False, "int", torch.float32),
    (4, 32, True, "int", torch.float32),
    (8, 128, False, "float", torch.float32),
    (8, 16, True, "float"),
    (4, 32, False, "float"),
    (4, 8, True, "float", torch.float32),
]


QUANTIZED_SHAPES = [(1, 1), (5, 33), (70, 47), (129, 576)]


@pytest.mark.parametrize(
    ("level", "shape", "quantized", "dtype"), pairwise(native.levels(), QUANTIZED_SHAPES, QUANTIZED, DTYPES), ids=str
)
def test_product_of_a_quantized_weight(level, shape, quantized, dtype):
    torch.manual_seed(0)
    packed, plain = make_quantized(*shape, *quantized)
    bias = torch.randn(shape[0]).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = F.linear(x.double(), plain, bias.double())
        assert_close(linear(x, packed, bias, level=level), expected.to(dtype), **NEAR[dtype])


ROUNDED = [quantized for quantized in QUANTIZED if quantized[:1] + quantized[3:4] != (8, "float")]  # not FP8


@pytest.mark.parametrize(
    ("level", "shape", "quantized", "dtype"),
    pairwise(native.levels(), QUANTIZED_SHAPES, [*ROUNDED, (8, 24, True), (4, 40, False)], DTYPES),
    ids=str,
)
def test_product_of_rounded_rows(level, shape, quantized, dtype):
    """Rows are rounded for the products with codes; the minima are multiplied by the sums of the rows as they are."""
    torch.manual_seed(0)
    packed, values, minima = make_parts(*shape, *quantized)
    bias = torch.randn(shape[0]).to(dtype)
    for rows in (1, 2, 3, 5, 7, 12, 13, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        rounded = round_rows(x, packed.block_inputs).double()
        expected = F.linear(rounded, values, bias.double()) + F.linear(x.double(), minima)
        found = linear(x, packed._replace(int8_rows=True), bias, level=level)
        assert_close(found, expected.to(dtype), **NEAR[dtype])


@pytest.mark.parametrize("level", native.levels())
def test_products_of_the_largest_codes_are_exact(level):
    """No sum of integers saturates or overflows, also over all inputs at once."""
    x = torch.full((1, 4096), 127.0) * torch.tensor([[1.0], [-1.0]])
    for code, bits in ((-128, 8), (127, 8), (-32, 6), (31, 6), (-16, 5), (15, 5), (-8, 4), (7, 4)):
        codes = torch.full((16, 4096), code, dtype=torch.int8)
        packed = pack_quantized(codes, torch.ones(16, 1), None, 4096, bits)._replace(int8_rows=True)
        assert torch.equal(linear(x, packed, level=level), (x.sum(1, keepdim=True) * code).expand(2, 16))


def test_rows_are_rounded_to_the_nearest_codes_of_each_group():
    x = torch.tensor([254.0, 1.0, 3.0, -254.0, 5.1, 0, 0, 0] + [0.0] * 8 + [1e-3] * 16)
    rounded = [254.0, 0.0, 4.0, -254.0, 6.0, 0, 0, 0]  # steps of 2, ties to even
    assert_close(round_rows(x, 8)[:8], torch.tensor(rounded))
    assert_close(round_rows(x, 16), torch.tensor(rounded + [0.0] * 8 + [1e-3] * 16))
    assert_close(round_rows(x, 96), torch.tensor(rounded + [0.0] * 24))  # groups of 32 at most
    assert_close(round_rows(x[:20], 16), round_rows(x, 16)[:20])


@pytest.mark.parametrize("level", native.levels())
def test_infinities_and_nans_of_rounded_rows_stay_in_their_rows(level):
    packed = make_quantized(33, 40, 4, 8, False)[0]._replace(int8_rows=True)
    x = torch.ones(20, 40)
    x[3, 5], x[17, 39] = torch.inf, torch.nan
    found = linear(x, packed, level=level)
    assert found[3].isnan().all() and found[17].isnan().all()
    assert found[[row for row in range(20) if row not in (3, 17)]].isfinite().all()


CASES = [(None, False), *((one, False) for one in QUANTIZED), *((one, True) for one in ROUNDED)]


@pytest.mark.parametrize(("level", "case", "dtype"), pairwise(native.levels(), CASES, DTYPES), ids=str)
def test_row_result_does_not_depend_on_other_rows(level, case, dtype):
    quantized, int8_rows = case
    torch.manual_seed(0)
    packed = make_quantized(200, 96, *quantized)[0] if quantized else pack_linear(torch.randn(200, 96).to(dtype))
    packed = packed._replace(int8_rows=int8_rows)
    x = torch.randn(max(ROWS), 96).to(dtype)
    together = linear(x, packed, level=level)
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], packed, level=level), together[:rows])
        assert torch.equal(linear(x[rows - 1 :], packed, level=level), together[rows - 1 :])


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
    codes = pack_quantized(torch.ones(40, 24, dtype=torch.int8), torch.rand(40, 3).half(), None, 8, 8)
    fp8 = pack_quantized(torch.ones(40, 24).to(torch.float8_e4m3fn), torch.rand(40, 3).half(), None, 8, 8)
    for rows, weight, added, message in (
        (x.bfloat16(), packed, None, "the weight and x have different types"),
        (torch.randn(2, 23), packed, None, "rows of 23 for a weight of 24 inputs"),
        (
            x,
            packed._replace(out_features=60),
            None,
            "a weight of 4608 bytes for 24 inputs and 60 outputs, which have 6144",
        ),
        (x, packed, bias[:39], "bias must be 40 dense elements of the type of x"),
        (x, packed, bias.bfloat16(), "bias must be 40"),
        (x, packed, torch.randn(80)[::2], "bias must be 40"),
        (
            x,
            codes._replace(wide_scales=True),
            None,
            "a weight of 1440 bytes for 24 inputs and 40 outputs, which have 1728",
        ),
        (x, codes._replace(has_mins=True), None, "a weight of 1440 bytes"),
        (x, codes._replace(block_inputs=12), None, "block_inputs=12: must be a multiple of 8"),
        (x, codes._replace(kind="int5"), None, "block_inputs=8: must be a multiple of 32"),
        (x, packed._replace(int8_rows=True), None, "the weight must have codes in integers or e2m1"),
        (x, fp8._replace(int8_rows=True), None, "the weight must have codes in integers or e2m1"),
        (x.to(torch.int8), codes, None, "rows must be float32, float16 or bfloat16"),
        (x.to(torch.float8_e4m3fn), codes, None, "rows must be float32, float16 or bfloat16"),
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
