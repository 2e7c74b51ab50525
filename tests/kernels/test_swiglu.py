"""SwiGLU: Triton in the interpreter or on a GPU, PyTorch and C++ on a CPU."""

import pytest
import torch
from torch.testing import assert_close

from paged_kernels.cpu import native, pytorch
from paged_kernels.layer_ops import swiglu, swiglu_reference
from tests.support.layer_cases import TOLERANCES, implementations, name, normal

ACTIVATIONS = implementations(on_cpu=pytorch.swiglu, compiled=native.swiglu, triton=swiglu)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize(("implementation", "where", "dtype"), ACTIVATIONS, ids=name)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (5, 96), (2, 1025), (0, 16)])
def test_swiglu(implementation, where, dtype, num_tokens, width, device):
    gate_up = 4 * normal(num_tokens, 4 * width, dtype=dtype, device=where or device)[:, : 2 * width]
    if num_tokens:
        gate_up[0, 0] = -200.0  # exp overflows: silu is 0
    found = implementation(gate_up)
    assert_close(found, swiglu_reference(gate_up), **TOLERANCES[dtype])
    gate, up = gate_up.float().chunk(2, 1)
    assert_close(found.float(), torch.nn.functional.silu(gate) * up, **TOLERANCES[dtype])
