"""Linear layers over few rows: Triton in the interpreter or on a GPU, and PyTorch on a CPU."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import layer_ops as module
from paged_kernels.cpu import pytorch
from paged_kernels.launch import Device
from paged_kernels.layer_ops import few_rows_linear, few_rows_linear_reference
from tests.support.layer_cases import name, normal
from tests.support.pairwise import pairwise

TOLERANCES = {
    torch.float32: dict(rtol=1e-4, atol=1e-4),
    torch.float16: dict(rtol=1e-2, atol=1e-2),
    torch.bfloat16: dict(rtol=4e-2, atol=4e-2),
}
VARIANTS = [
    {},
    {"bias"},
    {"norm"},
    {"norm", "residual"},
    {"norm", "residual", "swiglu"},
    {"norm", "residual", "swiglu", "bias"},
]
SHAPES = [(1, 96, 64), (5, 300, 40), (17, 1100, 33), (70, 64, 16)]  # rows, inputs, outputs


def inputs(variant, shape, dtype, device):
    rows, width, outputs = shape
    weight_rows = 2 * outputs if "swiglu" in variant else outputs

    def tensor(*size, seed, scale=1.0):
        return (scale * normal(*size, dtype=torch.float32, device=device, seed=seed)).to(dtype)

    optional = dict(
        bias=tensor(weight_rows, seed=2) if "bias" in variant else None,
        residual=tensor(rows, width, seed=3) if "residual" in variant else None,
        norm=tensor(width, seed=4) if "norm" in variant else None,
    )
    settings = dict(eps=1e-5, swiglu="swiglu" in variant)
    return (tensor(rows, width, seed=0), tensor(weight_rows, width, seed=1, scale=width**-0.5)), optional | settings


MULTIPROCESSORS = [8, 1000]  # few are filled by tiles of outputs, many by splits of the inputs


@pytest.fixture
def use_multiprocessors(monkeypatch):
    """Sets the number of multiprocessors."""
    monkeypatch.setattr(module, "MIN_SPLIT_STEPS", 1)
    return lambda count: monkeypatch.setattr(module, "device_of", lambda device: Device("sm_90", count))


CASES = [
    *itertools.product([few_rows_linear], [None], [torch.float32, torch.float16]),
    *itertools.product([pytorch.few_rows_linear], ["cpu"], [torch.float32, torch.bfloat16]),
]


@pytest.mark.parametrize(
    ("case", "shape", "variant", "multiprocessors"), pairwise(CASES, SHAPES, VARIANTS, MULTIPROCESSORS), ids=name
)
def test_few_rows_linear(case, shape, variant, multiprocessors, use_multiprocessors, device):
    use_multiprocessors(multiprocessors)
    implementation, where, dtype = case
    (x, weight), options = inputs(variant, shape, dtype, where or device)
    found, total = implementation(x, weight, **options)
    expected, expected_total = few_rows_linear_reference(x, weight, **options)
    assert_close(found, expected, **TOLERANCES[dtype])
    assert torch.equal(total, expected_total)
    assert found.shape == expected.shape and found.dtype == dtype


@pytest.mark.parametrize("multiprocessors", MULTIPROCESSORS)
def test_a_row_does_not_depend_on_the_others(multiprocessors, use_multiprocessors, device):
    """Rows in tiles of 16, 32 and 64 rows: the order of each sum is the same."""
    use_multiprocessors(multiprocessors)
    (x, weight), options = inputs({"norm", "residual", "swiglu"}, (50, 600, 20), torch.float32, device)
    whole, _ = few_rows_linear(x, weight, **options)
    residual = options.pop("residual")
    for rows in (1, 16, 17, 33):
        part, _ = few_rows_linear(x[:rows], weight, residual=residual[:rows], **options)
        assert_close(part, whole[:rows], rtol=1e-6, atol=1e-6)


def test_no_rows(device):
    (x, weight), options = inputs({"norm"}, (0, 32, 16), torch.float32, device)
    assert few_rows_linear(x, weight, **options)[0].shape == (0, 16)


def test_strided_rows(device):
    (x, weight), options = inputs({"norm", "residual"}, (4, 64, 16), torch.float32, device)
    wide = torch.stack((x, x), 1)[:, 0]
    expected = few_rows_linear(x, weight, **options)
    assert all(map(torch.equal, few_rows_linear(wide, weight, **options), expected))
