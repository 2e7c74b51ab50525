"""Results of a row have the same bits in every batch: attention at each chunking and block size, and linear layers."""

import dataclasses

import pytest
import torch

from paged_backend.models.quantization import quantize as quantize_weight
from paged_kernels.cpu import native
from paged_kernels.cpu.build import WITHOUT_TILES
from paged_kernels.cpu.packed_linear import pack_linear
from paged_kernels.layer_cache import FORMATS, LayerCache, pack_full_blocks, plain_channels, quantize
from paged_kernels.packed_blocks import BLOCK_SIZE, PackedBlocks
from paged_kernels.paging import Paging
from tests.support.attention_cases import replace_paging
from tests.support.pairwise import pairwise

LEVELS = [level for level in native.levels() if level not in WITHOUT_TILES]  # tiles add in another order
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTH = 1300  # three parts, the last one with a short tile


def paging_of(length, chunks, block_size):
    """Return the addresses of chunks [start, end) of one sequence, as sequences of a batch, its table, and the pool's
    size."""
    generator, width = torch.Generator().manual_seed(block_size), -(-length // block_size)
    table = torch.randperm(width + 2, generator=generator, dtype=torch.int32)[:width]
    starts = [0]
    for start, end in chunks:
        starts.append(starts[-1] + end - start)
    paging = Paging(
        slots=torch.empty(0, dtype=torch.int64),
        block_tables=table.repeat(len(chunks), 1),
        context_lens=torch.tensor([end for _, end in chunks], dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        max_query_len=max(end - start for start, end in chunks),
        max_context_len=length,
    )
    return paging, table.long(), width + 2


def attend(query, keys, values, chunks, *, block_size, format, level, **settings):
    """Return attention of the queries of these chunks, in the order of positions."""
    paging, table, num_blocks = paging_of(len(keys), chunks, block_size)
    position, pools = torch.arange(len(keys)), []
    for rows in (keys, values):
        pool = torch.full((num_blocks, keys.shape[1], block_size, rows.shape[2]), float("nan"), dtype=keys.dtype)
        pool[table[position // block_size], :, position % block_size] = rows
        pools.append(pool)
    cache = LayerCache(*pools)
    if format:
        dtype = next((dtype for dtype, name in FORMATS.items() if name == format), torch.int8)
        (pools[0], key_scales), (pools[1], value_scales) = (quantize(pool, dtype) for pool in pools)
        cache = LayerCache(*pools, key_scales, value_scales)
    if format == "int4":
        cache, paging = packed(cache, paging, table[: len(keys) // BLOCK_SIZE])
    rows = torch.cat([query[start:end] for start, end in chunks])
    return native.paged_attention(rows, cache, paging, scale=query.shape[-1] ** -0.5, level=level, **settings)


def packed(cache, paging, blocks):
    """Return the cache and addresses with these blocks packed, into blocks of the same numbers."""
    num_blocks, num_kv_heads, _, head_dim = cache.keys.shape
    shapes = PackedBlocks.shapes(num_kv_heads, head_dim, cache.value_dim)
    cache = dataclasses.replace(
        cache,
        key_channels=plain_channels(num_kv_heads, head_dim, cache.keys.device),
        packed=PackedBlocks(*(torch.zeros((num_blocks, *shape), dtype=dtype) for shape, dtype in shapes)),
    )
    last = blocks * BLOCK_SIZE + BLOCK_SIZE - 1
    pack_full_blocks(cache, last, last)
    return cache, replace_paging(paging, packed=paging)


def split(positions, lengths):
    """Yield chunks of these lengths, in turn, that cover the positions."""
    start, turn = positions[0], 0
    while start < positions[1]:
        end = min(positions[1], start + lengths[turn % len(lengths)])
        yield start, end
        start, turn = end, turn + 1


SETTINGS = ({}, {"sliding_window": 77}, {"sliding_window": 600, "softcap": 5.0})


@pytest.mark.parametrize(
    ("heads", "dtype", "format", "settings"),
    pairwise([(1, 64), (3, 80), (8, 128)], DTYPES, [None, *FORMATS.values()], SETTINGS),
    ids=str,
)
def test_a_query_gets_the_same_bits_alone_and_in_every_chunk(heads, dtype, format, settings, threads):
    """At the start, across the ends of tiles and parts, and at the end of a context."""
    ways = (((1,), 16), ((40,), 16), ((2, 13), 64), ((7, 1, 5), 1))
    check_same_bits(*heads, dtype, format, settings, threads, ways)


@pytest.mark.parametrize(
    ("heads", "dtype", "settings"), pairwise([(1, 64), (3, 96), (8, 128)], DTYPES, SETTINGS), ids=str
)
def test_a_query_gets_the_same_bits_from_packed_blocks_alone_and_in_every_chunk(heads, dtype, settings, threads):
    ways = [(lengths, BLOCK_SIZE) for lengths in ((1,), (40,), (2, 13), (7, 1, 5))]
    check_same_bits(*heads, dtype, "int4", settings, threads, ways)


def check_same_bits(group, head_dim, dtype, format, settings, threads, ways):
    """ways: lengths of chunks, in turn, with the size of blocks."""
    generator = torch.Generator().manual_seed(head_dim)
    query, keys, values = (
        torch.randn((LENGTH, heads, head_dim), generator=generator).to(dtype) for heads in (2 * group, 2, 2)
    )
    settings = settings | {"sinks": torch.randn(2 * group, generator=generator).to(dtype)} if group == 3 else settings
    for level in LEVELS:
        for first, last in ((0, 40), (500, 530), (1020, 1030), (LENGTH - 12, LENGTH)):
            attended = [
                attend(
                    query, keys, values, list(split((first, last), lengths)),
                    block_size=block_size, format=format, level=level, **settings,
                )
                for lengths, block_size in ways
            ]  # fmt: skip
            threads(3)
            for other in attended[1:]:
                assert torch.equal(attended[0], other), f"{level}: queries {first} to {last}"


def test_queries_of_several_items_over_several_spans_get_the_same_bits_alone(threads):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn((4700, heads, 64), generator=generator).bfloat16() for heads in (8, 1, 1))
    for first, last in ((4060, 4140), (4600, 4700)):
        alone = attend(query, keys, values, list(split((first, last), (1,))), block_size=16, format=None, level=None)
        threads(3)
        chunk = attend(query, keys, values, [(first, last)], block_size=32, format=None, level=None)
        assert torch.equal(alone, chunk)


def weights(dtype):
    """Return weights of 83 inputs and 70 outputs in all formats, of which some need rows of another type."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((70, 83), generator=generator).to(dtype)
    yield "plain", pack_linear(weight)
    for bits, size in ((8, None), (4, 32)):
        packed = quantize_weight(weight, bits, size)
        for int8_rows in (False, True):
            yield f"int{bits}, int8_rows={int8_rows}", packed._replace(int8_rows=int8_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_linear_layer_have_the_same_bits_for_any_number_of_rows(dtype):
    x = torch.randn((300, 83), generator=torch.Generator().manual_seed(0)).to(dtype)
    for name, weight in weights(dtype):
        experts = native.ExpertLinear([weight] * 3)
        alone = torch.cat([native.linear(row, weight) for row in x.split(1)])
        for count in (2, 3, 5, 7, 9, 13, 17, 25, 33, 64, 65, 130, 300):
            assert torch.equal(native.linear(x[:count], weight), alone[:count]), f"{name}: {count} rows"
            starts = torch.tensor([0, count // 3, count // 3, count])
            assert torch.equal(experts(x[:count], starts), alone[:count]), f"{name}: {count} rows of experts"


SAME = [level for level in native.levels() if level.startswith("avx512") or level == "amx"]


@pytest.mark.skipif(len(SAME) < 2, reason="this machine has one level with vectors of 512 bits")
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_levels_with_vectors_of_512_bits_give_the_same_bits(dtype):
    """Except in bfloat16, for which some have an instruction of their own."""
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn((600, heads, 80), generator=generator).to(dtype) for heads in (6, 2, 2))
    chunks, x = [(0, 90), (500, 501), (555, 560)], torch.randn((9, 83), generator=generator).to(dtype)
    for format in (None, "int8"):
        attended = [attend(query, keys, values, chunks, block_size=16, format=format, level=level) for level in SAME]
        assert all(torch.equal(attended[0], other) for other in attended[1:])
    for name, weight in weights(dtype):
        products = [native.linear(x, weight, level=level) for level in SAME]
        assert all(torch.equal(products[0], other) for other in products[1:]), name


@pytest.mark.parametrize(("level", "used"), [("amx", "avx512_bf16"), ("amx_emulated", "plain"), ("avx512", "avx512")])
def test_tiles_can_be_avoided(level, used, monkeypatch):
    monkeypatch.setenv(native.LEVEL, level)
    monkeypatch.setattr(native, "_avoided_tiles", [])
    assert native.level() == level
    native.avoid_tiles()
    assert native.level() == used
    monkeypatch.undo()
    native._index.cache_clear()
