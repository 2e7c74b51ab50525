"""Attention over packed blocks."""

import pytest
import torch

from tests.support.attention_cases import PACKED, make_inputs
from paged_kernels.paged_attention import paged_attention, paged_attention_reference
from torch.testing import assert_close


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_fp32_matches_reference(case, device):
    inputs = make_inputs(case, torch.float32, device)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    actual = paged_attention(*inputs.arrays, **inputs.settings)
    assert not expected.isnan().any()
    assert_close(actual, expected, atol=1e-5, rtol=1e-5)
