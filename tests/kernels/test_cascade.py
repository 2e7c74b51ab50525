"""Shared prefixes of decode rows: finding the groups, and attention that reads a prefix once."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from paged_kernels import attention_plan
from paged_kernels import paged_attention as module
from paged_kernels.cpu.paged_attention import paged_attention as attend_cpu
from paged_kernels.launch import Device
from paged_kernels.packed_blocks import NAN_SCALE
from paged_kernels.paged_attention import paged_attention, paged_attention_reference, plan_launch
from paged_kernels.paging import Paging, SharedPrefixes, find_prefix_groups, read_ratio
from tests.support.attention_cases import BATCHES, Case, make_inputs, replace_paging

# (query_len, context_len, group or None): the rows of a group share SHARED[group] tokens, in whole blocks of 16
SHARED = (64, 16, 112)
ROWS = (
    *((1, 70 + 3 * i, 0) for i in range(4)),
    (1, 40, None),
    (20, 60, None),
    *((1, 17 + 40 * i, 1) for i in range(3)),
    (1, 0, None),
    *((1, 113 + 16 * i, 2) for i in range(2)),
)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Use splits of 32 keys, and a workspace full of NaN, to detect reads of partials that were not written."""
    monkeypatch.setattr(attention_plan, "MIN_SPLIT", 32)
    monkeypatch.setattr(module, "device_of", lambda device: Device("sm_90", 12))
    empty = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *a, **options: empty(*a, **options).fill_(float("nan")))
    monkeypatch.setitem(BATCHES, "shared", tuple(row[:2] for row in ROWS))


def with_shared_blocks(inputs, device: str, num_groups: int = 5) -> tuple[torch.Tensor, object, Paging]:
    """Give all members of a group the leading blocks of its first member; their own blocks become NaN."""
    query, cache, paging = inputs.arrays
    tables = paging.block_tables.clone()
    lens = torch.zeros(len(ROWS), dtype=torch.int32)
    members: list[int] = []
    starts = [0]
    for group, shared in enumerate(SHARED):
        rows = [i for i, row in enumerate(ROWS) if row[2] == group]
        for other in rows[1:]:
            for tensor in cache.tensors if cache.format is None else (cache.key_scales, cache.value_scales):
                tensor[tables[other, : shared // 16].long()] = float("nan")
            tables[other, : shared // 16] = tables[rows[0], : shared // 16]
        lens[rows] = shared
        members += rows[::-1] if group else rows
        starts.append(len(members))
    starts += [len(members)] * (num_groups + 1 - len(starts))
    members += [-7] * (len(ROWS) - len(members))
    int32 = dict(dtype=torch.int32, device=device)
    prefixes = SharedPrefixes(
        lens.to(device), torch.tensor(members, **int32), torch.tensor(starts, **int32), max(SHARED)
    )
    return query * 3, cache, replace_paging(paging, block_tables=tables, shared=prefixes)


@pytest.mark.parametrize(
    ("case", "dtype", "multiprocessors"),
    [
        (Case("shared", 1, 4), torch.float32, 1),
        pytest.param(Case("shared", 1, 4), torch.float16, 12, marks=pytest.mark.nightly),
        (Case("shared", 2, 3, sinks=True), torch.float32, 24),
        (Case("shared", 1, 1, 72, softcap=5.0, strided=True), torch.float32, 12),
        pytest.param(Case("shared", 1, 20, 32), torch.float32, 1, marks=pytest.mark.nightly),
        pytest.param(Case("shared", 1, 4, sinks=True, format="int8"), torch.float32, 12, marks=pytest.mark.nightly),
        (Case("shared", 1, 4, sinks=True, format="fp8"), torch.float16, 12),
        (Case("shared", 1, 4, head_dim=288, value_dim=256, latent=True), torch.float32, 12),
        pytest.param(Case("shared", 1, 4, head_dim=96, value_dim=40), torch.float32, 12, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_matches_reference(case, dtype, multiprocessors, device, monkeypatch):
    monkeypatch.setattr(module, "device_of", lambda device: Device("sm_90", multiprocessors))
    inputs = make_inputs(case, dtype, device)
    query, cache, paging = with_shared_blocks(inputs, device)
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    assert not expected.isnan().any()
    actual = paged_attention(query, cache, paging, **inputs.settings)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_more_members_than_fit_a_tile(device, monkeypatch):
    monkeypatch.setitem(BATCHES, "many", ((1, 33),) * 23)
    inputs = make_inputs(Case("many", 1, 4, 32), torch.float32, device)
    query, cache, paging = inputs.arrays
    tables = paging.block_tables.clone()
    tables[1:, :2] = tables[0, :2]
    int32 = dict(dtype=torch.int32, device=device)
    prefixes = SharedPrefixes(
        torch.full((23,), 32, **int32), torch.arange(23, **int32), torch.tensor([0, 23], **int32), 32
    )  # fmt: skip
    paging = replace_paging(paging, block_tables=tables, shared=prefixes)
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    assert_close(paged_attention(query, cache, paging, **inputs.settings), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [96, 160])  # with 160, a step is half a block, and a split ends within one
def test_packed_blocks_match_reference(head_dim, device, monkeypatch):
    """Members other than the leader of a group have blocks of NaN, which only the reference replaces."""
    monkeypatch.setattr(attention_plan, "MIN_SPLIT", 48)
    monkeypatch.setitem(BATCHES, "members", ((1, 101), (1, 129), (1, 97), (1, 40)))
    case = Case("members", 1, 4, head_dim, block_size=32, sinks=True, format="int4")
    query, cache, paging = (inputs := make_inputs(case, torch.float32, device)).arrays
    tables, packed_tables = paging.block_tables.clone(), paging.packed.block_tables.clone()
    first, replaced = tables[1:3, 0].long(), packed_tables[1:3, 1:3].flatten().long()
    cache.key_scales[first] = cache.value_scales[first] = torch.nan
    cache.packed.key_scales[replaced] = cache.packed.value_scales[replaced] = NAN_SCALE
    tables[1:3, 0], packed_tables[1:3, :3] = tables[0, 0], packed_tables[0, :3]
    packed = replace_paging(paging.packed, block_tables=packed_tables)
    whole = replace_paging(paging, block_tables=tables, packed=packed)
    expected = paged_attention_reference(query, cache, whole, **inputs.settings)
    assert not expected.isnan().any()
    parts = ([96, 96, 96, 0], [0, 2, 1, -7], [0, 3])
    prefixes = SharedPrefixes(*(torch.tensor(part, dtype=torch.int32, device=device) for part in parts), 96)
    found = paged_attention(query, cache, replace_paging(paging, shared=prefixes), **inputs.settings)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_only_the_prefix_pass_reads_shared_blocks(device):
    """With wrong blocks in a member's table the result is the same: the pass reads the leader's blocks for all."""
    inputs = make_inputs(Case("shared", 1, 4), torch.float32, device)
    query, cache, paging = with_shared_blocks(inputs, device)
    expected = paged_attention(query, cache, paging, **inputs.settings)
    tables = paging.block_tables.clone()
    tables[1, :4] = tables[1, 4]  # wrong blocks for a member that is not the leader
    found = paged_attention(query, cache, replace_paging(paging, block_tables=tables), **inputs.settings)
    assert torch.equal(found, expected)


def test_sliding_window_ignores_shared_prefixes(device):
    inputs = make_inputs(Case("shared", 1, 4, sliding_window=50), torch.float32, device)
    query, cache, paging = with_shared_blocks(inputs, device)
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    assert_close(paged_attention(query, cache, paging, **inputs.settings), expected, atol=1e-5, rtol=1e-5)


def test_cpu_ignores_shared_prefixes():
    inputs = make_inputs(Case("shared", 1, 4), torch.float32)
    query, cache, paging = with_shared_blocks(inputs, "cpu")
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    assert_close(attend_cpu(query, cache, paging, **inputs.settings), expected, atol=1e-5, rtol=1e-5)


def test_grids_do_not_depend_on_which_rows_share(device):
    inputs = make_inputs(Case("shared", 1, 4), torch.float32, device)
    query, cache, paging = with_shared_blocks(inputs, device)
    some = paging.shared
    no_rows = SharedPrefixes(
        torch.zeros_like(some.lens), some.members, torch.zeros_like(some.group_starts), some.max_len
    )
    settings = {**inputs.settings, "device": Device("sm_90", 132)}
    plans = [
        plan_launch(query, query, cache, replace_paging(paging, shared=shared), **settings)
        for shared in (some, no_rows)
    ]
    assert [p.grid for p in plans[0]] == [p.grid for p in plans[1]]
    assert len(plans[0]) == 2
    alone = paged_attention(query, cache, replace_paging(paging, shared=no_rows), **inputs.settings)
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    assert_close(alone, expected, atol=1e-5, rtol=1e-5)


# --- finding groups


def tables_of(shared: dict[tuple[int, ...], int], num_seqs: int, columns: int = 200) -> np.ndarray:
    """Make tables of blocks of 16 that are all different, except for the leading tokens of the given rows."""
    tables = np.arange(num_seqs * columns, dtype=np.int32).reshape(num_seqs, columns)
    for rows, tokens in shared.items():
        tables[list(rows), : tokens // 16] = tables[rows[0], : tokens // 16]
    return tables


def found_groups(groups: SharedPrefixes) -> dict[tuple[int, ...], int]:
    spans = zip(groups.group_starts[:-1], groups.group_starts[1:], strict=True)
    members = [tuple(sorted(groups.members[a:b].tolist())) for a, b in spans if b > a]
    for rows in members:
        assert len({int(groups.lens[row]) for row in rows}) == 1
    assert (groups.lens > 0).sum() == sum(len(rows) for rows in members)
    return {rows: int(groups.lens[rows[0]]) for rows in members}


def find(tables, context_lens, query_lens=None):
    context_lens = np.broadcast_to(context_lens, len(tables)).astype(np.int64)
    query_lens = np.ones(len(tables), int) if query_lens is None else query_lens
    return find_prefix_groups(tables, context_lens, query_lens, block_size=16, group=4)


def test_groups_of_different_prefixes_are_found_in_any_order():
    shared = {(0, 4, 9, 11, 12): 2048, (1, 3, 10): 1040, (2, 5): 3000 // 16 * 16}
    groups = find(tables_of(shared, 16), 3100)
    assert found_groups(groups) == shared
    assert groups.max_len == 2992


def test_common_first_block_does_not_hide_longer_prefixes():
    tables = tables_of({tuple(range(16)): 16}, 16)
    for rows in ((0, 2, 4, 6, 8), (1, 3, 5, 7)):
        tables[list(rows), 1:128] = tables[rows[0], 1:128]
    assert found_groups(find(tables, 2500)) == {(0, 2, 4, 6, 8): 2048, (1, 3, 5, 7): 2048}


def test_newest_token_of_a_member_is_never_shared():
    tables = tables_of({(0, 1, 2, 3, 4, 5, 6, 7): 3200}, 8)
    assert found_groups(find(tables, [2064] + [2500] * 7)) == {tuple(range(8)): 2048}
    assert found_groups(find(tables, [2065] + [2500] * 7)) == {tuple(range(8)): 2064}


def test_only_decode_rows_form_groups():
    tables = tables_of({tuple(range(8)): 2048}, 8)
    assert found_groups(find(tables, 2500, np.array([1, 1, 1, 7, 1, 0, 1, 1]))) == {(0, 1, 2, 4, 6, 7): 2048}


def test_equal_blocks_after_a_difference_are_not_a_prefix():
    tables = tables_of({tuple(range(8)): 2048}, 8)
    tables[3, 2] = 10**6
    assert find(tables, 2500) is None


@pytest.mark.parametrize(
    ("rows", "shared", "context", "pays"),
    [
        (64, 2048, 2304, True),
        (64, 128, 400, False),  # shorter than LEAST_SHARED
        (2, 2048, 2304, False),  # saves 2,048 tokens per layer: less than the cost of a launch
        (16, 1024, 1280, True),
        (64, 256, 3100, False),  # 8% of all reads
        (1, 2048, 2304, False),
    ],
)
def test_groups_are_formed_only_if_they_pay_off(rows, shared, context, pays):
    assert (find(tables_of({tuple(range(rows)): shared}, rows), context) is not None) == pays


def test_group_shapes_depend_on_the_number_of_rows_only():
    one = find(tables_of({tuple(range(20)): 2048}, 64), 2500)
    two = find(tables_of({tuple(range(0, 64, 2)): 1040, tuple(range(1, 64, 2)): 2048}, 64), 2500)
    for name in ("lens", "members", "group_starts"):
        assert getattr(one, name).shape == getattr(two, name).shape
        assert getattr(one, name).dtype == torch.int32


def test_groups_that_save_most_are_kept_if_there_are_too_many():
    pairs = {(2 * i, 2 * i + 1, *range(100 + 4 * i, 104 + 4 * i)): 256 + 16 * i for i in range(25)}
    groups = find(tables_of(pairs, 200), 1000)
    assert sorted(found_groups(groups).values()) == [256 + 16 * i for i in range(9, 25)]


def test_read_ratio_formula():
    assert read_ratio(64, 2048, 256) == pytest.approx(64 * 2304 / (2048 + 64 * 256))
    assert read_ratio(1, 2048, 256) == 1
