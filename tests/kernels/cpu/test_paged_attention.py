"""Paged attention on a CPU against the reference: PyTorch, and C++ at every level of this machine."""

import dataclasses
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import ops
from paged_kernels.cpu import native
from paged_kernels.cpu import paged_attention as cpu
from paged_kernels.cpu.build import WITHOUT_TILES
from paged_kernels.layer_cache import FORMATS, LayerCache, pack_full_blocks, plain_channels
from paged_kernels.packed_blocks import BLOCK_SIZE, PackedBlocks, is_packed
from paged_kernels.paged_attention import paged_attention_reference
from tests.support.attention_cases import BATCHES, PACKED, Case, make_inputs, make_paging, replace_paging, sample
from tests.support.pairwise import pairwise

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
COMPILED = {level: partial(native.paged_attention, level=level) for level in native.levels()}
ATTEND = {"PyTorch": cpu.paged_attention, **COMPILED}
if shutil.which("g++"):
    assert {"plain", "amx_emulated"} <= COMPILED.keys()


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, dtype) for seed, dtype in enumerate(TOLERANCE) for case in sample(28, seed)], ids=str
)
def test_matches_reference(case, dtype):
    inputs = make_inputs(case, dtype)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    for name, attend in ATTEND.items():
        actual = attend(*inputs.arrays, **inputs.settings)
        close = torch.isclose(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])  # not where it is NaN
        assert close.all(), f"{name}: off by {(actual - expected).abs().max()}"


@pytest.mark.parametrize(
    ("group", "head_dim", "format"),
    pairwise([1, 2, 3, 4, 5, 7, 8, 12, 13], [32, 64, 77, 80, 128, 256], [None, *FORMATS.values()]),
    ids=str,
)
def test_groups_of_any_size_match_reference(group, head_dim, format):
    """Group sizes up to more than are read in place; contexts from less than a vector to a tile and two keys."""
    dtype = torch.bfloat16 if head_dim == 64 else torch.float32
    for batch in ("decode", "padded"):
        test_matches_reference(Case(batch, group=group, head_dim=head_dim, format=format), dtype)


@pytest.mark.parametrize(("scale", "size"), [(0.0, 1), (-0.1, 1), (0.125, 1e9)])
def test_scores_of_any_sign_and_size_match_reference(scale, size):
    query, cache, paging = make_inputs(Case("mixed"), torch.float32).arrays
    expected = paged_attention_reference(size * query, cache, paging, scale=scale)
    for name, attend in ATTEND.items():
        assert_close(attend(size * query, cache, paging, scale=scale), expected, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_packed_blocks_match_reference(dtype):
    for case in PACKED:
        test_matches_reference(case, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 64, 65, 66])  # the query at 96 reads from 33, 32 and 31 on
def test_first_block_is_read_in_int8(window, dtype, monkeypatch):
    """Contexts that end in each of the first blocks, and chunks that begin in them."""
    ends = (1, 31, 32, 33, 63, 64, 65, 96, 97, 129)
    monkeypatch.setitem(BATCHES, "first", (*((1, end) for end in ends), (40, 50), (5, 35), (70, 102), (3, 97)))
    test_matches_reference(
        Case("first", head_dim=32, block_size=BLOCK_SIZE, sliding_window=window, format="int4"), dtype
    )


def cache_to_pack(head_dim, value_dim):
    """Return a cache of 9 full blocks to be packed, whose elements have all magnitudes and some of which are NaN."""
    generator = torch.Generator().manual_seed(head_dim)
    pools, scales = [], []
    for size in (head_dim, value_dim):
        pools.append(torch.randint(-127, 128, (9, 2, BLOCK_SIZE, size), generator=generator, dtype=torch.int8))
        sizes = torch.randint(-22, 10, (9, 2, 1), generator=generator)  # up to zeros and scales that are too large
        scales.append(torch.exp2(sizes) * torch.rand((9, 2, BLOCK_SIZE), generator=generator))
        pools[-1][1] = 100  # all the same
        pools[-1][2, :, :, ::3] = 0
        scales[-1][3, 1, 5] = torch.nan
        scales[-1][4] = 2.0**40
    shapes = PackedBlocks.shapes(2, head_dim, value_dim)
    packed = PackedBlocks(*(torch.full((11, *shape), 77, dtype=dtype) for shape, dtype in shapes))
    return LayerCache(*pools, *scales, plain_channels(2, head_dim, torch.device("cpu")), packed=packed)


@pytest.mark.parametrize("sizes", [(32, 32), (64, 96), (96, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
def test_blocks_are_packed_into_the_same_bits_as_by_the_definition(attend, sizes, threads):
    head_dim, _ = sizes
    slots = torch.tensor([31, 63, 95, 127, 159, -1, 191, 222, -1, 287])  # the last ones of the blocks 0 to 5 and 8
    packed_slots = torch.tensor([351, 31, 95, 127, 191, -1, 223, 318, -1, 255])
    nobody = make_paging(((len(slots), 0),), BLOCK_SIZE)[0]
    packed = replace_paging(nobody, slots=packed_slots)
    expected = cache_to_pack(*sizes)
    pack_full_blocks(expected, slots, packed_slots)
    assert (expected.packed.key_scales == 255).any() and (expected.packed.key_scales == 0).any()
    for count in (1, 3):
        threads(count)
        cache = cache_to_pack(*sizes)
        attend(
            torch.zeros(len(slots), 2, head_dim), cache, replace_paging(nobody, slots=slots, packed=packed), scale=1.0
        )
        for found, wanted in zip(cache.packed.tensors, expected.packed.tensors, strict=True):
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))  # a zero that is NaN may have any bits


@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
def test_blocks_that_a_step_fills_are_packed_before_they_are_read(attend):
    case = Case("prefill", block_size=BLOCK_SIZE, format="int4")
    inputs, same = (make_inputs(case, torch.float32) for _ in range(2))
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert_close(attend(*same.arrays, **same.settings), expected, atol=1e-5, rtol=1e-5)


def blocks_read(paging, window):
    """Return which blocks of each sequence its queries read in int8, and which packed: [num_seqs, max_blocks] bool."""
    num_seqs, max_blocks = paging.block_tables.shape
    keys, reads = torch.arange(max_blocks * BLOCK_SIZE), torch.zeros(2, num_seqs, max_blocks, dtype=torch.bool)
    for seq, (context, queries) in enumerate(zip(paging.context_lens, paging.query_starts.diff(), strict=True)):
        at = torch.arange(context - queries, context)[:, None]
        seen, packed = (keys <= at) & (keys > at - (window or context)), is_packed(keys, at)
        for read, which in zip(reads, (seen & ~packed, seen & packed), strict=True):
            read[seq] = which.any(dim=0).view(-1, BLOCK_SIZE).any(dim=1)
    return reads


@pytest.mark.parametrize("window", [None, 80])  # 80: the first sequence does not read its first block
@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
def test_blocks_that_no_query_reads_need_no_address(attend, window, monkeypatch):
    monkeypatch.setitem(BATCHES, "long", ((40, 170), (5, 100)))
    query, cache, paging = make_inputs(Case("long", block_size=BLOCK_SIZE, format="int4"), torch.float32).arrays

    def attended(*unknown, width=None):
        """Attend with the number -7 in these entries of both tables, and with this many columns of the packed table."""
        tables, packed_tables = (
            of.block_tables.masked_fill(which, -7) for of, which in zip((paging, paging.packed), unknown, strict=True)
        )
        packed = replace_paging(paging.packed, block_tables=packed_tables[:, :width])
        changed = replace_paging(paging, block_tables=tables, packed=packed)
        return attend(query, cache, changed, scale=1.0, sliding_window=window)

    reads = blocks_read(paging, window)
    assert (~reads).any(dim=2).all()
    newest = (170 - 1) // BLOCK_SIZE
    assert torch.equal(attended(*~reads, width=newest), attended(*torch.zeros_like(reads)))
    with pytest.raises(RuntimeError, match=f"sequence 0: context of 170, block table of {newest}"):
        attended(*~reads, width=newest - 1)
    for table, seq, column in reads.nonzero().tolist():
        unknown = ~reads
        unknown[table, seq, column] = True
        with pytest.raises(RuntimeError, match=rf"^{('', 'packed ')[table]}block_tables\[{seq}\]: block -7"):
            attended(*unknown)


@pytest.mark.parametrize("attend", [cpu.paged_attention, native.paged_attention])
def test_layers_with_packed_blocks_need_their_addresses(attend):
    query, cache, paging = make_inputs(Case("decode", block_size=BLOCK_SIZE, format="int4"), torch.float32).arrays
    with pytest.raises(AssertionError):
        attend(query, cache, replace_paging(paging, packed=None), scale=1.0)


def test_slots_outside_the_packed_pool_are_rejected():
    query, cache, paging = make_inputs(Case("prefill", block_size=BLOCK_SIZE, format="int4"), torch.float32).arrays
    for slot in (-1, len(cache.packed.key_codes) * BLOCK_SIZE):
        packed = replace_paging(paging.packed, slots=torch.full_like(paging.slots, slot))
        with pytest.raises(RuntimeError, match=f"and {slot} of pools of"):
            native.paged_attention(query, cache, replace_paging(paging, packed=packed), scale=1.0)


LONG = {"decode": ((1, 2100), (1, 300)), "chunk": ((9, 4500), (1, 40))}
PACKED_LONG = {"head_dim": 64, "block_size": BLOCK_SIZE, "format": "int4"}


@pytest.mark.parametrize(
    "settings", [{}, {"sinks": True, "softcap": 4.0}, {"sliding_window": 700}, PACKED_LONG], ids=str
)
@pytest.mark.parametrize("spans", LONG.values(), ids=LONG)
@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
def test_split_contexts_match_the_reference_on_any_number_of_threads(attend, spans, settings, threads, monkeypatch):
    monkeypatch.setitem(BATCHES, "long", spans)
    case = dataclasses.replace(Case("long", num_kv_heads=1, head_dim=72), **settings)
    inputs = make_inputs(case, torch.float32)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    threads(1)
    first = attend(*inputs.arrays, **inputs.settings)
    threads(4)
    assert torch.equal(first, attend(*inputs.arrays, **inputs.settings))
    assert_close(first, expected, atol=1e-5, rtol=1e-5)


# Sequences that begin with the blocks of the first one: queries, context, and tokens in these blocks
IN_COMMON = (
    (1, 1100, 0),
    (1, 1090, 1024),  # two parts of 512 keys
    (3, 700, 640),  # one part and a quarter
    (1, 600, 0),
    (1, 513, 512),
    (1, 512, 480),
    (3, 515, 512),
    (40, 1080, 1024),
    *((1, 560 + i, 512) for i in range(22)),  # more rows than an item has
)


@pytest.mark.parametrize(
    "settings",
    [{}, {"group": 3, "sinks": True, "softcap": 4.0}, {"format": "int8", "head_dim": 80}, PACKED_LONG],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_with_the_same_blocks_get_the_same_bits_as_alone(settings, dtype, monkeypatch):
    monkeypatch.setitem(BATCHES, "common", tuple(row[:2] for row in IN_COMMON))
    case = dataclasses.replace(Case("common", num_kv_heads=2, group=8, head_dim=64), **settings)
    inputs = make_inputs(case, dtype)
    query, cache, paging = inputs.arrays
    paging = share_blocks(paging, [row[2] // case.block_size for row in IN_COMMON])
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    alone = [one_sequence(query, paging, i) for i in range(len(IN_COMMON))]
    for level, attend in COMPILED.items():
        attended = attend(query, cache, paging, **inputs.settings)
        assert_close(attended, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], msg=level)
        if level not in WITHOUT_TILES or dtype is torch.float32:
            each = [attend(own, cache, of_one, **inputs.settings) for own, of_one in alone]
            assert torch.equal(attended, torch.cat(each)), level


def share_blocks(paging, counts):
    """Give each sequence this many blocks of the first one."""
    tables = paging.block_tables.clone()
    for table, count in zip(tables, counts, strict=True):
        table[:count] = tables[0, :count]
    packed = paging.packed and share_blocks(paging.packed, counts)
    return replace_paging(paging, block_tables=tables, packed=packed)


def one_sequence(query, paging, number):
    """Return the queries and addresses of one sequence of a batch."""
    first, end = paging.query_starts[number : number + 2].tolist()
    own = dict(
        slots=paging.slots[first:end],
        block_tables=paging.block_tables[number : number + 1],
        context_lens=paging.context_lens[number : number + 1],
        query_starts=torch.tensor([0, end - first], dtype=torch.int32),
    )
    packed = paging.packed and one_sequence(query, paging.packed, number)[1]
    return query[first:end], replace_paging(paging, **own, packed=packed)


@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
@pytest.mark.parametrize(
    "case",
    [
        Case("decode"),
        Case("mixed", format="int8"),
        Case("prefill", head_dim=128),
        Case("mixed", format="int4", block_size=BLOCK_SIZE),
    ],
    ids=str,
)
def test_batches_have_the_same_bits_on_any_number_of_threads(attend, case, threads):
    inputs = make_inputs(case, torch.bfloat16)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(attend(*inputs.arrays, **inputs.settings))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("attend", COMPILED.values(), ids=COMPILED)
def test_addresses_outside_the_pool_are_rejected(attend):
    query, cache, paging = make_inputs(Case("decode"), torch.float32).arrays
    for block in (-1, len(cache.keys)):
        tables = paging.block_tables.clone()
        tables[4, 8] = block
        with pytest.raises(RuntimeError, match=rf"block_tables\[4\]: block {block} of a pool of {len(cache.keys)}"):
            attend(query, cache, replace_paging(paging, block_tables=tables), scale=1.0)
    with pytest.raises(RuntimeError, match="sequence 4: context of 130, block table of 8"):
        attend(query, cache, replace_paging(paging, block_tables=paging.block_tables[:, :8]), scale=1.0)
    with pytest.raises(RuntimeError, match="sequence 4: its query rows are outside"):
        attend(query[:4], cache, paging, scale=1.0)
    too_many, _ = make_paging(((5, 3),), 16)
    with pytest.raises(RuntimeError, match="5 queries, context of 3"):
        attend(query, cache, too_many, scale=1.0)


@pytest.mark.nightly
def test_larger_sample_matches_reference(in_time, figures):
    cases = [case for seed in range(10, 30) for case in sample(84, seed)]
    done = [test_matches_reference(case, torch.float32) for case in in_time(cases)]
    figures(f"{len(done):,} of {len(cases):,} cases")


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0}, {"sliding_window": 300}], ids=str)
def test_chunk_longer_than_a_query_tile(settings, monkeypatch):
    monkeypatch.setattr(cpu, "QUERY_TILE", 16)
    inputs = make_inputs(Case("mixed"), torch.float32)
    inputs.settings.update(settings)
    expected = paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert_close(cpu.paged_attention(*inputs.arrays, **inputs.settings), expected, atol=1e-5, rtol=1e-5)


def test_layers_of_a_step_share_one_plan():
    query, cache, paging = make_inputs(Case(), torch.float32).arrays
    for _ in range(3):
        cpu.paged_attention(query, cache, paging, scale=1.0)
    assert len(paging.plans) == 1
    cpu.paged_attention(query, cache, paging, scale=1.0, sliding_window=8)
    assert len(paging.plans) == 2


def test_window_gathers_only_its_own_blocks():
    paging, _ = make_paging(((1, 4000), (1, 3000)), 16)
    calls = paging.plan(cpu.LayerKey(1, 16, 8, 8, torch.float32, window=64, packed=False))
    assert sum(call.keys.shape[0] * call.keys.shape[2] for call in calls) <= 2 * (64 + 2 * 16)


def test_decode_rows_of_different_length_are_not_padded_to_the_longest():
    context_lens = [30, 8000, 500, 40, 7900, 35, 510]
    paging, _ = make_paging(tuple((1, n) for n in context_lens), 16)
    calls = paging.plan(cpu.LayerKey(3, 16, 64, 64, torch.float32, window=None, packed=False))
    gathered = sum(call.keys.shape[0] * call.keys.shape[2] for call in calls)
    assert gathered <= 1.2 * sum(context_lens)
    assert len(calls) < len(context_lens)
    assert sorted(torch.cat([call.rows for call in calls]).tolist()) == list(range(7))


def test_more_queries_than_context_fail_an_assertion():
    query, cache, _ = make_inputs(Case(), torch.float32).arrays
    paging, _ = make_paging(((5, 3),), 16)
    with pytest.raises(AssertionError, match="5 queries, context of 3"):
        cpu.paged_attention(query[:5], cache, paging, scale=1.0)


def test_dispatch_reaches_the_cpu_implementation():
    inputs = make_inputs(Case(), torch.float32)
    expected = (native if COMPILED else cpu).paged_attention(*inputs.arrays, **inputs.settings)
    assert torch.equal(ops.paged_attention(*inputs.arrays, **inputs.settings), expected)
    _query, cache, paging = inputs.arrays
    new = torch.ones(len(paging.slots), 2, 64)
    ops.kv_write(new, new, cache, paging.slots)
    slot = int(paging.slots[0])
    assert cache.keys[slot // 16, :, slot % 16].eq(1).all()
    assert cache.values[slot // 16, :, slot % 16].eq(1).all()


def test_cpu_operations_do_not_import_triton(compiled_environment):
    script = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch
from paged_kernels import ops
from paged_kernels.cpu import native
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paging import Paging
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
