"""Linear layers of a mixture of experts in C++, against the linear layer of each expert."""

import pytest
import torch

from paged_kernels.cpu import native
from paged_kernels.cpu.native import ExpertLinear, linear, swiglu
from paged_kernels.cpu.packed_linear import pack_linear
from tests.support.pairwise import pairwise
from tests.support.quantized_weights import make_quantized

pytestmark = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COUNTS = [  # rows of each expert
    [1, 0, 3, 0],
    [0, 0, 0, 1],
    [5, 1, 70, 30],  # several blocks of rows
]


def starts_of(counts):
    return torch.tensor([0, *counts]).cumsum(0)


@pytest.mark.parametrize(
    ("level", "has_bias", "gated", "counts", "dtype"),
    pairwise(native.levels(), [False, True], [False, True], COUNTS, DTYPES),
    ids=str,
)
def test_each_row_is_multiplied_by_its_expert(level, has_bias, gated, counts, dtype):
    torch.manual_seed(0)
    packed = [pack_linear(torch.randn(96, 40).to(dtype)) for _ in counts]
    biases = torch.randn(len(counts), 96).to(dtype) if has_bias else None
    x = torch.randn(sum(counts), 40).to(dtype)
    found = ExpertLinear(packed, biases, level=level)(x, starts_of(counts), swiglu=gated)
    expected = [
        linear(rows, weight, biases[index] if has_bias else None, level=level)
        for index, (rows, weight) in enumerate(zip(x.split(counts), packed, strict=True))
    ]
    expected = torch.cat(expected)
    assert torch.equal(found, swiglu(expected, level=level) if gated else expected)


@pytest.mark.parametrize(("bits", "has_mins", "int8_rows"), [(8, False, False), (4, True, True)])
@pytest.mark.parametrize("level", native.levels())
def test_quantized_experts(level, bits, has_mins, int8_rows):
    torch.manual_seed(0)
    packed = [make_quantized(64, 96, bits, 32, has_mins)[0]._replace(int8_rows=int8_rows) for _ in range(3)]
    x = torch.randn(9, 96)
    found = ExpertLinear(packed, level=level)(x, starts_of([2, 0, 7]))
    expected = torch.cat([linear(x[:2], packed[0], level=level), linear(x[2:], packed[2], level=level)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    torch.manual_seed(0)
    layer = ExpertLinear([pack_linear(torch.randn(256, 512)) for _ in range(8)])
    x, starts = torch.randn(100, 512), starts_of([0, 40, 1, 9, 20, 0, 29, 1])
    before = native.threads()
    try:
        native.set_threads(1)
        expected = layer(x, starts)
        native.set_threads(threads)
        assert torch.equal(layer(x, starts), expected)
    finally:
        native.set_threads(before)


def test_no_rows():
    layer = ExpertLinear([pack_linear(torch.randn(32, 16))] * 2)
    assert layer(torch.empty(0, 16), starts_of([0, 0])).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "starts", "message"),
    [
        (torch.zeros(3, 15), starts_of([1, 2]), "x must be dense rows of 16"),
        (torch.zeros(3, 16), starts_of([1, 1]), "starts must increase from 0 to the number of rows, 3"),
        (torch.zeros(3, 16), torch.tensor([0, 4, 3]), "starts must increase from 0 to the number of rows, 3"),
        (torch.zeros(3, 16), starts_of([3]), "starts must be 3 dense elements of int64"),
        (torch.zeros(3, 16), starts_of([1, 2]).int(), "starts must be 3 dense elements of int64"),
        (torch.zeros(3, 16, dtype=torch.float16), starts_of([1, 2]), "the weight and x have different types"),
    ],
)
def test_arguments_that_do_not_match(x, starts, message):
    layer = ExpertLinear([pack_linear(torch.randn(48, 16))] * 2)
    with pytest.raises(RuntimeError, match=message):
        layer(x, starts)


def test_swiglu_needs_whole_groups():
    layer = ExpertLinear([pack_linear(torch.randn(48, 16))])
    with pytest.raises(RuntimeError, match="out_features=48 must be a multiple of 32"):
        layer(torch.zeros(1, 16), starts_of([1]), swiglu=True)


def test_experts_have_the_same_shape():
    with pytest.raises(RuntimeError, match="different shapes"):
        ExpertLinear([pack_linear(torch.randn(16, 16)), pack_linear(torch.randn(16, 8))])
