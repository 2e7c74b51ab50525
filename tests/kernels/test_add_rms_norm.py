"""RMS norms: Triton in the interpreter or on a GPU, PyTorch and C++ on a CPU."""

import pytest
import torch
from torch.testing import assert_close

from paged_kernels.cpu import native, pytorch
from paged_kernels.layer_ops import add_rms_norm, add_rms_norm_reference
from tests.support.layer_cases import TOLERANCES, implementations, name, normal
from tests.support.pairwise import pairwise

NORMS = implementations(on_cpu=pytorch.add_rms_norm, compiled=native.add_rms_norm, triton=add_rms_norm)


@pytest.mark.parametrize(
    ("case", "shape", "with_residual"),
    pairwise(NORMS, [(1, 8), (5, 576), (3, 1025), (0, 16)], [False, True]),
    ids=name,
)
def test_add_rms_norm(case, shape, with_residual, device):
    (implementation, where, dtype), (num_tokens, hidden) = case, shape

    def made(seed, *shape):
        return normal(*shape, dtype=dtype, device=where or device, seed=seed)

    x, weight = 3 * made(0, num_tokens, 2 * hidden)[:, :hidden], made(1, hidden)  # rows of a wider tensor
    residual = made(2, num_tokens, hidden) if with_residual else None
    arguments = x, residual, weight, 1e-2
    normed, total = implementation(*arguments)
    expected = add_rms_norm_reference(*arguments)
    assert_close(normed, expected[0], **TOLERANCES[dtype])
    assert torch.equal(total, expected[1])
    if num_tokens:
        assert_close(normed.float(), torch.nn.functional.rms_norm(total.float(), (hidden,), weight.float(), 1e-2),
                     **TOLERANCES[dtype])  # fmt: skip
