"""The Triton kernels, in the interpreter or on a GPU, against the reference; the reference against torch."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from paged_kernels import paged_attention as paged_attention_module
from paged_kernels.launch import Device
from paged_kernels.paged_attention import paged_attention, paged_attention_reference
from tests.support.attention_cases import AXES, BATCHES, PACKED, Case, make_inputs, make_paging, move_paging, sample
from tests.support.pairwise import mostly_nightly

NUM_SAMPLES = 16  # at least as many as an axis has values
SAMPLE = sample(NUM_SAMPLES, seed=235)  # with this seed the cases cost little in the interpreter
FEW_PACKED = [case for case in PACKED if case.value_dim == 192 or (case.batch, case.group) == ("decode", 3)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    actual = paged_attention(*inputs.arrays, **inputs.settings)  # first, because it packs blocks
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert actual.dtype == dtype
    assert not expected.isnan().any()
    assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_fp32_matches_reference(case, device):
    check(case, torch.float32, device)


@pytest.mark.parametrize(
    ("case", "dtype"),
    mostly_nightly(
        itertools.product(PACKED, (torch.float32, torch.float16)),
        default=[*((case, torch.float32) for case in FEW_PACKED), (FEW_PACKED[0], torch.float16)],
    ),
    ids=str,
)
def test_packed_blocks_match_reference(case, dtype, device):
    check(case, dtype, device)


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float16), (50, torch.float32), (100, torch.float16)])
def test_chunks_in_any_packed_blocks_match_reference(window, dtype, device, monkeypatch):
    """Chunks in the first block only, in others too, from the second one on, and far behind it.

    The windows of the last one exclude the first block, or a part of it. Tiles have 16 or 64 queries.
    """
    monkeypatch.setitem(BATCHES, "blocks", ((17, 25), (66, 90), (40, 72), (20, 130)))
    check(Case("blocks", 1, 1, value_dim=32, block_size=32, sliding_window=window, format="int4"), dtype, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="depends on the chip")
def test_fp8_is_converted_without_an_instruction_on_older_chips(monkeypatch):
    monkeypatch.setattr(paged_attention_module, "device_of", lambda device: Device("sm_80", 132))
    for dtype in (torch.float32, torch.float16):
        check(Case("mixed", format="fp8", sinks=True), dtype, "cpu")


@pytest.mark.nightly
@pytest.mark.parametrize("case", sample(NUM_SAMPLES, seed=1)[-NUM_SAMPLES:], ids=str)
def test_fp16_matches_reference(case, device):
    check(case, torch.float16, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies bf16 incorrectly")
@pytest.mark.parametrize("case", sample(84, seed=2), ids=str)
def test_bf16_matches_reference(case, device):
    check(case, torch.bfloat16, device)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_larger_sample_matches_reference(dtype, device, in_time, figures):
    cases = [case for seed in range(10, 30) for case in sample(84, seed)]
    done = [check(case, dtype, device) for case in in_time(cases)]
    figures(f"{len(done):,} of {len(cases):,} cases")


def test_sample_covers_every_value_of_every_axis():
    for name, values in AXES.items():
        assert {getattr(case, name) for case in SAMPLE} >= set(values), name


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("batch", BATCHES)
def test_reference_equals_sdpa_on_contiguous_keys(batch, group):
    inputs = make_inputs(Case(batch, group=group), torch.float32)
    query, *_, paging = inputs.arrays
    actual = paged_attention_reference(*inputs.arrays, **inputs.settings)
    for seq, (query_len, context_len) in enumerate(BATCHES[batch]):
        rows = slice(int(paging.query_starts[seq]), int(paging.query_starts[seq + 1]))
        if context_len == 0:
            assert not actual[rows].any()
            continue
        visible = torch.ones(context_len, context_len).tril()[context_len - query_len :].bool()
        heads_first = (x.transpose(0, 1) for x in (query[rows], inputs.keys[seq], inputs.values[seq]))
        expected = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=True)
        assert_close(actual[rows], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_reference_window_counts_the_query_itself():
    inputs = make_inputs(Case("decode", sliding_window=1), torch.float32)
    actual = paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert_close(actual, torch.stack([v[-1].repeat_interleave(3, dim=0) for v in inputs.values]))


def test_reference_softcap_and_sinks_equal_their_formula():
    inputs = make_inputs(Case("decode", 1, 1, softcap=0.5, sinks=True), torch.float32)
    actual = paged_attention_reference(*inputs.arrays, **inputs.settings)
    for row, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True)):
        weights = (0.5 * (keys[:, 0] @ inputs.arrays[0][row, 0] / 8 / 0.5).tanh()).exp()
        expected = weights @ values[:, 0] / (weights.sum() + inputs.settings["sinks"].exp())
        assert_close(actual[row, 0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "block_size"), [("decode", 16), ("decode", 64), ("mixed", 16)])
def test_keys_before_the_window_are_not_read(batch, block_size, device):
    """Their block may have visible keys. They may be NaN, which a weight of 0 would not remove."""
    inputs = make_inputs(Case(batch, block_size=block_size, sliding_window=13), torch.float32, device)
    _, cache, paging = inputs.arrays
    expected = paged_attention(*inputs.arrays, **inputs.settings)
    for table, (query_len, context_len) in zip(paging.block_tables, BATCHES[batch], strict=True):
        position = torch.arange(max(context_len - query_len - 12, 0), device=device)
        for pool in (cache.keys, cache.values):
            pool[table[position // block_size].long(), :, position % block_size] = torch.nan
    assert torch.equal(paged_attention(*inputs.arrays, **inputs.settings), expected)


def test_row_does_not_depend_on_the_rest_of_the_batch(device):
    inputs = make_inputs(Case("decode"), torch.float32, device)
    query, cache, paging = inputs.arrays
    together = paged_attention(query, cache, paging, scale=0.1)
    alone, _ = make_paging(((1, 130),), 16)
    alone.block_tables[0] = paging.block_tables[4, : alone.block_tables.shape[1]]
    alone = move_paging(alone, device)
    assert torch.equal(paged_attention(query[4:], cache, alone, scale=0.1), together[4:])
