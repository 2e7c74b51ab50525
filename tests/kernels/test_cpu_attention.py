"""The CPU's paged attention against the reference, and what its plan promises."""

import subprocess
import sys

import pytest
import torch
from attention_cases import Case, make_inputs, make_paging, sample
from torch.testing import assert_close

from kernels import ops
from kernels.cpu import paged_attention as cpu
from kernels.paged_attention import paged_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", sample(84), ids=str)
def test_matches_reference(case, dtype):
    inputs = make_inputs(case, dtype)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    actual = cpu.paged_attention(*inputs.arrays, **inputs.settings)
    assert not actual.isnan().any()
    assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 30))
def test_larger_sample_matches_reference(seed):
    for case in sample(84, seed):
        test_matches_reference(case, torch.float32)


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0}, {"sliding_window": 300}], ids=str)
def test_a_chunk_longer_than_a_query_tile(settings, monkeypatch):
    monkeypatch.setattr(cpu, "QUERY_TILE", 16)
    inputs = make_inputs(Case("mixed"), torch.float32)
    inputs.settings.update(settings)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert_close(cpu.paged_attention(*inputs.arrays, **inputs.settings), expected, atol=1e-5, rtol=1e-5)


def test_layers_of_a_step_share_one_plan():
    query, cache, paging = make_inputs(Case(), torch.float32).arrays
    for _ in range(3):
        cpu.paged_attention(query, cache, paging, scale=1.0)
    assert len(paging.derived) == 1
    cpu.paged_attention(query, cache, paging, scale=1.0, sliding_window=8)
    assert len(paging.derived) == 2


def test_a_window_gathers_only_its_own_blocks():
    paging, num_blocks = make_paging(((1, 4000), (1, 3000)), 16)
    calls = cpu._plan(paging, torch.Size((num_blocks, 1, 16, 8)), torch.float32, window=64)
    assert sum(call.keys.shape[0] * call.keys.shape[2] for call in calls) <= 2 * (64 + 2 * 16)


def test_decode_rows_of_very_different_length_are_not_padded_to_the_longest():
    context_lens = [30, 8000, 500, 40, 7900, 35, 510]
    paging, num_blocks = make_paging(tuple((1, n) for n in context_lens), 16)
    calls = cpu._plan(paging, torch.Size((num_blocks, 3, 16, 64)), torch.float32, window=None)
    gathered = sum(call.keys.shape[0] * call.keys.shape[2] for call in calls)
    assert gathered <= 1.2 * sum(context_lens)
    assert len(calls) < len(context_lens)
    assert sorted(torch.cat([call.rows for call in calls]).tolist()) == list(range(7))


def test_more_queries_than_context_is_a_bug_of_the_caller():
    query, cache, _ = make_inputs(Case(), torch.float32).arrays
    paging, _ = make_paging(((5, 3),), 16)
    with pytest.raises(AssertionError, match="5 queries, context of 3"):
        cpu.paged_attention(query[:5], cache, paging, scale=1.0)


def test_dispatch_reaches_the_cpu_implementation():
    inputs = make_inputs(Case(), torch.float32)
    expected = cpu.paged_attention(*inputs.arrays, **inputs.settings)
    assert torch.equal(ops.paged_attention(*inputs.arrays, **inputs.settings), expected)
    _query, cache, paging = inputs.arrays
    new = torch.ones(len(paging.slots), 2, 64)
    ops.kv_write(new, new, cache, paging.slots)
    slot = int(paging.slots[0])
    assert cache.keys[slot // 16, :, slot % 16].eq(1).all()
    assert cache.values[slot // 16, :, slot % 16].eq(1).all()


def test_a_cpu_needs_no_triton(compiled_environment):
    script = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch
from kernels import ops
from kernels.layer_cache import LayerCache
from kernels.paging import Paging
one, cache = torch.ones(1, 2, 8), LayerCache(*torch.zeros(2, 1, 2, 4, 8))
int32 = torch.int32
paging = Paging(torch.tensor([3]), torch.zeros(1, 1, dtype=int32), torch.tensor([4], dtype=int32),
                torch.tensor([0, 1], dtype=int32), 1, 4)
ops.kv_write(one, one, cache, paging.slots)
out = ops.paged_attention(one, cache, paging, scale=1.0)
weight = torch.tensor([0.0, 0, 0, 8]).softmax(0)[3]
assert torch.allclose(out, weight.expand(1, 2, 8)), out
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=compiled_environment, timeout=120)
