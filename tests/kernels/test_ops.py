"""Operations: a setting out of range is named, and an implementation is imported when the first tensor arrives."""

import pytest
import torch

from paged_kernels import ops
from tests.support.attention_cases import Case, make_inputs
from tests.support.operations import DISPATCHES


@pytest.mark.parametrize("on_cpu", [False, True], ids=["GPU", "CPU"])
@pytest.mark.parametrize("names", DISPATCHES, ids=lambda names: names[0])
def test_every_operation_has_an_implementation(names, on_cpu):
    function, module = names[0], names[-1]
    found = ops._implementation.__wrapped__(module, function, on_cpu)
    assert callable(found)
    assert found.__module__.startswith("paged_kernels.cpu." if on_cpu else "paged_kernels.")


def test_all_operations_are_covered():
    assert len(DISPATCHES) == 12


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        (Case(), {"sliding_window": 0}, r"sliding_window=0: must be at least 1"),
        (Case(), {"softcap": 0.0}, r"softcap=0.0: must be above 0"),
        (Case(), {"softcap": float("nan")}, r"softcap=nan: must be above 0"),
        (Case(head_dim=577), {}, r"head_dim=577: must be 1..576"),
        (Case(value_dim=577), {}, r"value_dim=577: must be 1..576"),
        (Case(block_size=24), {}, r"block_size=24: must be a power of two in 1..256"),
        (Case(block_size=512), {}, r"block_size=512: must be a power of two in 1..256"),
    ],
)
def test_setting_out_of_range_is_rejected_by_name(case, settings, message, device):
    inputs = make_inputs(case, torch.float32, device)
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(*inputs.arrays, **{**inputs.settings, **settings})


def test_indivisible_heads_are_rejected_by_name(device):
    query, cache, paging = make_inputs(Case(num_kv_heads=2), torch.float32, device).arrays
    with pytest.raises(ValueError, match=r"num_heads=5: must be a multiple of num_kv_heads=2"):
        ops.paged_attention(query[:, :5], cache, paging, scale=1.0)
