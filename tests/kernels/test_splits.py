"""Splits of a sequence's keys over several programs, and the merge of their results."""

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import attention_plan
from paged_kernels import paged_attention as module
from paged_kernels.launch import Device
from paged_kernels.paged_attention import paged_attention, paged_attention_reference, plan_launch
from tests.support.attention_cases import BATCHES, Case, make_inputs, replace_paging

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
LONG = ((1, 260), (1, 31), (1, 0), (1, 128), (1, 161))
MULTIPROCESSORS = 24


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Use splits of 32 keys, and a workspace full of NaN, to detect reads of partials that were not written."""
    monkeypatch.setattr(attention_plan, "MIN_SPLIT", 32)
    empty = torch.empty

    def spoilt(*shape, **options):
        return empty(*shape, **options).fill_(float("nan"))

    monkeypatch.setattr(module.torch, "empty", spoilt)
    monkeypatch.setitem(BATCHES, "long", LONG)
    use_multiprocessors(monkeypatch, MULTIPROCESSORS)


def use_multiprocessors(monkeypatch, count: int) -> None:
    monkeypatch.setattr(module, "device_of", lambda device: Device("sm_90", count))


def splits_of(inputs, multiprocessors: int = MULTIPROCESSORS, **changes: object) -> int:
    """Return the planned number of splits of a call."""
    query, cache, paging = inputs.arrays
    device = Device("sm_90", multiprocessors)
    last = plan_launch(query, query, cache, replace_paging(paging, **changes), **inputs.settings, device=device)[-1]
    return last.arguments["num_splits"]


@pytest.mark.parametrize("head_dim", [64, 66, 67])
def test_the_workspace_is_aligned_as_in_the_warm_up(head_dim):
    """Triton compiles another variant for a pointer that is not a multiple of 16 bytes."""
    inputs = make_inputs(Case("long", 3, 1, head_dim=head_dim), torch.float32, "cpu")
    query, cache, paging = inputs.arrays
    options = {**inputs.settings, "device": Device("sm_90", MULTIPROCESSORS)}
    for planned in plan_launch(query, query, cache, paging, **options):
        assert planned.arguments["num_splits"] > 1
        partials, logs = planned.arguments["partials"], planned.arguments["logs"]
        assert (logs.data_ptr() - partials.data_ptr()) % 16 == 0
        assert len(partials) >= len(logs) * head_dim


def check(case: Case, dtype: torch.dtype, device: str, **changes: object) -> None:
    inputs = make_inputs(case, dtype, device)
    query, cache, paging = inputs.arrays
    query = query * 3  # a peaked softmax, so that the splits have different weights
    paging = replace_paging(paging, **changes)
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    actual = paged_attention(query, cache, paging, **inputs.settings)
    rows = slice(0, int(paging.query_starts[-1]))
    assert not expected[rows].isnan().any()
    assert_close(actual[rows], expected[rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case("long", 1, 4), torch.float16),
        (Case("long", 2, 3, sinks=True), torch.float32),
        pytest.param(Case("long", 1, 4, sliding_window=100, sinks=True), torch.float32, marks=pytest.mark.nightly),
        pytest.param(Case("long", 1, 1, sliding_window=13), torch.float16, marks=pytest.mark.nightly),
        (Case("long", 1, 4, block_size=64, sliding_window=100), torch.float32),
        (Case("long", 1, 4, 72, softcap=5.0, sinks=True, strided=True), torch.float32),
        pytest.param(Case("long", 1, 20, 32, block_size=1), torch.float32, marks=pytest.mark.nightly),
        (Case("long", 1, 4, sinks=True, format="int8"), torch.float16),
        (Case("long", 1, 4, sinks=True, format="fp8"), torch.float32),
        (Case("long", 1, 4, block_size=32, sinks=True, format="int4"), torch.float32),
        (Case("long", 1, 4, 96, block_size=32, sliding_window=100, format="int4"), torch.float16),
        (Case("mixed", 1, 4, sinks=True), torch.float16),
        pytest.param(Case("mixed", 1, 3, sliding_window=64), torch.float32, marks=pytest.mark.nightly),
        pytest.param(Case("mixed", 1, 1, 32, format="int8"), torch.float32, marks=pytest.mark.nightly),
        pytest.param(Case("chunks", 1, 3, softcap=5.0), torch.float16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_splits_match_reference(case, dtype, device):
    assert splits_of(make_inputs(case, dtype)) > 1
    check(case, dtype, device)


def test_padding_sequences_get_zeros_from_the_merge(device):
    inputs = make_inputs(Case("padded", 1, 4, sinks=True), torch.float32)
    assert splits_of(inputs, max_context_len=200) > 1
    check(Case("padded", 1, 4, sinks=True), torch.float32, device, max_context_len=200)


@pytest.mark.parametrize("multiprocessors", [1, 12, 1000])
def test_one_few_and_many_splits(multiprocessors, device, monkeypatch):
    use_multiprocessors(monkeypatch, multiprocessors)
    inputs = make_inputs(Case("long", 1, 4, sinks=True), torch.float32)
    assert splits_of(inputs, multiprocessors) in {1: range(1, 2), 12: range(2, 9), 1000: range(9, 65)}[multiprocessors]
    check(Case("long", 1, 4, sinks=True), torch.float32, device)


@pytest.mark.parametrize("window", [None, 100])
def test_plan_for_the_maximum_context_leaves_splits_empty(window, device):
    """A captured CUDA graph plans for the model's maximum context."""
    case = Case("decode", 1, 4, sliding_window=window)
    inputs = make_inputs(case, torch.float32)
    assert splits_of(inputs, max_context_len=131072) > 130 // 32
    check(case, torch.float32, device, max_context_len=131072)


def test_queries_of_a_short_chunk_share_a_split(device, monkeypatch):
    """A split may hold keys that only the last query of its tile sees."""
    monkeypatch.setitem(BATCHES, "verify", ((4, 67), (3, 3), (2, 130)))
    assert splits_of(make_inputs(Case("verify", 1, 4), torch.float32)) > 1
    check(Case("verify", 1, 4, sinks=True), torch.float32, device)
    check(Case("verify", 1, 4, sliding_window=33), torch.float32, device)
    monkeypatch.setattr(attention_plan, "MIN_SPLIT", 48)  # splits begin and end within packed blocks
    check(Case("verify", 1, 4, 96, block_size=32, format="int4"), torch.float32, device)


def test_repeated_call_gives_the_same_bits(device):
    inputs = make_inputs(Case("long", 1, 4), torch.float32, device)
    first, second = (paged_attention(*inputs.arrays, **inputs.settings) for _ in range(2))
    assert torch.equal(first, second)


def test_equal_scores_give_the_mean_of_all_splits(device):
    """With equal scores, the output is the mean of the values, whichever splits they are in."""
    inputs = make_inputs(Case("long", 1, 4), torch.float32, device)
    query, cache, paging = inputs.arrays
    out = paged_attention(torch.zeros_like(query), cache, paging, **inputs.settings)
    for row, values in enumerate(inputs.values):
        mean = values.mean(0) if len(values) else torch.zeros(1, 64)
        assert_close(out[row].cpu(), mean.expand(4, -1), atol=1e-5, rtol=1e-5)


def test_grids_do_not_depend_on_lengths(monkeypatch):
    grids = []
    for lens in (((1, 600), (1, 10), (1, 10)), ((1, 520), (1, 500), (1, 0))):
        monkeypatch.setitem(BATCHES, "any", lens)
        inputs = make_inputs(Case("any", 1, 4), torch.float32)
        settings = {**inputs.settings, "device": Device("sm_90", 132)}
        grids.append([planned.grid for planned in plan_launch(inputs.arrays[0], *inputs.arrays, **settings)])
    assert grids[0] == grids[1]


def test_windowed_and_full_layers_have_separate_plans(device):
    """Layers of both kinds in one step use its cached plans."""
    inputs = make_inputs(Case("long", 1, 4), torch.float32, device)
    query, cache, paging = inputs.arrays
    for window in (None, 64, None):
        settings = {**inputs.settings, "sliding_window": window}
        expected = paged_attention_reference(query, cache, paging, **settings)
        assert_close(paged_attention(query, cache, paging, **settings), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case("behind", 1, 4, sinks=True),
        Case("behind", 2, 3, 40, block_size=256, sliding_window=150, softcap=5.0),
        Case("behind", 1, 4, format="int8"),
        Case("behind", 1, 4, 96, block_size=32, format="int4"),  # whose chunks are not split
    ],
    ids=str,
)
def test_keys_of_chunks_are_split(case, device, monkeypatch):
    """Chunks that fill few programs, behind contexts of several splits, beside decode rows and a padding sequence."""
    monkeypatch.setitem(BATCHES, "behind", ((70, 300), (1, 90), (40, 40), (0, 0), (5, 0), (66, 280)))
    use_multiprocessors(monkeypatch, 1000)
    inputs = make_inputs(case, torch.float16)
    query, cache, paging = inputs.arrays
    planned = plan_launch(query, query, cache, paging, **inputs.settings, device=Device("sm_90", 1000))[-1]
    assert (planned.arguments["large_splits"] > 2) == (case.format != "int4")
    check(case, torch.float16, device)
