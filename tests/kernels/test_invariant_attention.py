"""Batch-invariant attention: against the reference, and bit by bit in batches of every kind."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import attention_plan, invariant_attention, launch_table
from paged_kernels import paged_attention as paged_attention_module
from paged_kernels.attention_plan import Choice, key_blocks, rows_of_query
from paged_kernels.launch import Device
from paged_kernels.launch_table import Tile, TuningKey
from paged_kernels.paged_attention import paged_attention, paged_attention_reference
from paged_kernels.paging import SharedPrefixes
from tests.support.attention_cases import (
    PACKED,
    Case,
    make_cache,
    make_inputs,
    make_paging,
    move_paging,
    pack_inputs,
    replace_paging,
    sample,
)
from tests.support.fixed_order_dot import create_dot
from tests.support.pairwise import mostly_nightly

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
LENGTH, PARTITION = 150, 64  # of the sequence; of a partition in these tests, to have several
SPLITS = [1, 2, 5]


@pytest.fixture(autouse=True)
def partitions(monkeypatch):
    monkeypatch.setattr(invariant_attention, "PARTITION", PARTITION)


@pytest.fixture
def fixed_order(monkeypatch, device):
    if device == "cpu":
        import triton.runtime.interpreter as interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def forced(splits):
    return attention_plan.force(Choice(splits, small_tiles=False))


TYPES = [(torch.float32, 3), (torch.float16, 1)]  # with a number of splits


@pytest.mark.parametrize(
    ("case", "way"),
    mostly_nightly(
        itertools.product([*sample(8, seed=91), *PACKED], TYPES),
        default=zip([*sample(8, seed=91)[::6], PACKED[-1]], itertools.cycle(TYPES), strict=False),
    ),
    ids=str,
)
def test_matches_reference(case, way, device):
    dtype, splits = way
    inputs = make_inputs(case, dtype, device)
    query, cache, paging = inputs.arrays
    expected = paged_attention_reference(query, cache, paging, **inputs.settings)
    with forced(splits):
        actual = paged_attention(query, replace(cache, batch_invariant=True), paging, **inputs.settings)
    assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


class Contents:
    """Queries, keys and values of sequences, of which each batch computes some chunks."""

    def __init__(self, case, dtype, device):
        self.case, self.dtype, self.device = case, dtype, device
        generator = torch.Generator().manual_seed(0)
        heads, size = case.num_kv_heads * case.group, case.head_dim
        self.queries = torch.randn((3, LENGTH, heads, size), generator=generator).to(device, dtype)
        # The magnitude of keys and values changes from token to token, as do the scales of a quantized cache.
        magnitudes = torch.randn((3, LENGTH, 1, 1, 1), generator=generator).exp()
        self.kv = magnitudes * torch.randn((3, LENGTH, 2, case.num_kv_heads, size), generator=generator)
        self.sinks = torch.randn(heads, generator=generator).to(device, dtype) if case.sinks else None

    def attend(self, *chunks, block_size=None, splits=1, padding=(), shared=None, max_context_len=None):
        """Return the attention of chunks (sequence, first position, length) in one step, one tensor each. padding: rows
        of sequences without keys."""
        case, block_size = self.case, block_size or self.case.block_size
        spans = (*((length, start + length) for _, start, length in chunks), *((length, 0) for length in padding))
        paging, num_blocks = make_paging(spans, block_size)
        pool = torch.full((num_blocks, 2, case.num_kv_heads, block_size, case.head_dim), float("nan"))
        for table, (sequence, start, length) in zip(paging.block_tables.long(), chunks, strict=False):
            position = torch.arange(start + length)
            place = table[position // block_size], slice(None), slice(None), position % block_size
            pool[place] = self.kv[sequence, : start + length]
        stored = "int8" if case.format == "int4" else case.format
        cache = make_cache(
            pool.to(self.device, self.dtype), stored, strided=False, value_dim=case.value_dim, latent=case.latent
        )
        query = torch.cat(
            [self.queries[sequence, start : start + length] for sequence, start, length in chunks]
            + [self.queries[0, :length] for length in padding]
        )
        paging = replace_paging(
            move_paging(paging, self.device), shared=shared, max_context_len=max_context_len or paging.max_context_len
        )
        if case.format == "int4":
            cache, paging = pack_inputs(cache, paging)
        settings = dict(scale=0.1, sliding_window=case.sliding_window, softcap=case.softcap, sinks=self.sinks)
        with forced(splits):
            out = paged_attention(query, replace(cache, batch_invariant=True), paging, **settings)
        return out.split([length for length, _ in spans])[: len(chunks)]


CASES = [
    Case(group=3, head_dim=16),
    Case(group=2, head_dim=16, sliding_window=70, sinks=True),
    Case(num_kv_heads=1, group=4, head_dim=16, sliding_window=13, format="int8"),
    Case(group=1, head_dim=16, softcap=5.0, format="fp8"),
    Case(num_kv_heads=1, group=5, head_dim=48, value_dim=32, latent=True, sinks=True),
]
PACKED_CASE = Case(num_kv_heads=1, group=1, head_dim=32, block_size=32, sliding_window=70, format="int4")
POSITIONS = (0, 1, 63, 64, 65, 100, 127, 128, LENGTH - 1)


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("case", "dtype"),
    mostly_nightly(
        itertools.product([*CASES, PACKED_CASE], TOLERANCE),
        default=[(CASES[1], torch.float16), (PACKED_CASE, torch.float16)],
    ),
    ids=str,
)
@pytest.mark.usefixtures("fixed_order")
def test_bits_do_not_depend_on_the_batch(case, dtype, stride, tables, device, monkeypatch):
    """Alone, in a chunk of any length, in a step with others, with splits, other block sizes and other tables.

    The interpreter is slow: by default each of these has every eighth value only."""
    contents = Contents(case, dtype, device)
    (whole,) = contents.attend((0, 0, LENGTH))
    assert whole.isfinite().all()

    def check(start, length, found):
        assert torch.equal(bits(found), bits(whole[start : start + length])), (start, length)

    for position, splits in zip(POSITIONS[::stride], itertools.cycle(SPLITS), strict=False):
        check(position, 1, *contents.attend((0, position, 1), splits=splits))
    chunks = ((60, 90), (5, 7), (0, 70), (129, 4))[::stride]
    for (start, length), splits in zip(chunks, itertools.cycle(SPLITS), strict=False):
        check(start, length, *contents.attend((0, start, length), splits=splits))
    mixed = (1, 90, 1), (0, 140, 3), (2, 20, 40), (0, 66, 1), (1, 0, 1), (0, 100, 20)
    for splits in SPLITS[::-stride]:
        found = contents.attend(*mixed, splits=splits, padding=(1, 70), max_context_len=1000)
        for (sequence, start, length), rows in zip(mixed, found, strict=True):
            if sequence == 0:
                check(start, length, rows)
    for block_size in (1, 8, 64, 256)[::stride] if case.format != "int4" else ():
        check(120, 30, *contents.attend((0, 120, 30), block_size=block_size))
    block_d, itemsize = key_blocks(contents.case.head_dim)[0], contents.dtype.itemsize
    rows = rows_of_query(contents.case.group, itemsize, block_d)
    key = TuningKey(block_d, itemsize, rows, contents.case.format is not None, 4096)
    launch_table.use_table(launch_table.Table("sm_90", {key: Tile(64, 16, 2, 1)}))
    assert launch_table.find_tile("sm_90", key).block_n == 16
    check(120, 30, *contents.attend((0, 120, 30)))
    monkeypatch.setattr(paged_attention_module, "device_of", lambda device: Device("sm_90", 4))
    check(0, LENGTH, *contents.attend((0, 0, LENGTH)))


@pytest.mark.usefixtures("fixed_order")
def test_a_shared_prefix_does_not_affect_the_bits(device):
    contents = Contents(CASES[0], torch.float32, device)
    lens, members = torch.tensor([64, 64], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    shared = SharedPrefixes(lens, members, torch.tensor([0, 2], dtype=torch.int32), 64)
    shared = SharedPrefixes(*(one.to(device) for one in (shared.lens, shared.members, shared.group_starts)), 64)
    batch = (0, 130, 1), (0, 140, 1)
    for found, expected in zip(contents.attend(*batch, shared=shared), contents.attend(*batch), strict=True):
        assert torch.equal(found, expected)


def test_padding_is_zero(device):
    """Captured steps have sequences without keys. They get 0, as in other launches."""
    contents = Contents(CASES[1], torch.float32, device)
    for splits in SPLITS:
        (rows,) = contents.attend((0, 70, 2), splits=splits, padding=(1, 1, 70, 0))
        assert rows.isfinite().all()


def bits(tensor):
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
