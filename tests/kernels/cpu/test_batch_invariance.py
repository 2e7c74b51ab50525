"""Results of a row have the same bits in every batch: attention at each chunking and block size, and linear layers."""

import pytest
import torch

from paged_kernels.cpu import native
from paged_kernels.layer_cache import FORMATS, LayerCache, quantize
from paged_kernels.paging import Paging

TILED = {"amx", "amx_emulated"}  # with many rows they use tile instructions, which add in another order
LEVELS = [level for level in native.levels() if level not in TILED]
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
    scales = []
    if format:
        dtype = next(dtype for dtype, name in FORMATS.items() if name == format)
        (pools[0], key_scales), (pools[1], value_scales) = (quantize(pool, dtype) for pool in pools)
        scales = [key_scales, value_scales]
    rows = torch.cat([query[start:end] for start, end in chunks])
    return native.paged_attention(
        rows, LayerCache(*pools, *scales), paging, scale=query.shape[-1] ** -0.5, level=level, **settings
    )


def split(positions, lengths):
    """Yield chunks of these lengths, in turn, that cover the positions."""
    start, turn = positions[0], 0
    while start < positions[1]:
        end = min(positions[1], start + lengths[turn % len(lengths)])
        yield start, end
        start, turn = end, turn + 1


SETTINGS = ({}, {"sliding_window": 77}, {"sliding_window": 600, "softcap": 5.0})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("format", [None, *FORMATS.values()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 80), (8, 128)])
def test_a_query_gets_the_same_bits_alone_and_in_every_chunk(group, head_dim, dtype, format, settings, threads):
    """At the start, across the ends of tiles and parts, and at the end of a context."""
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
                for lengths, block_size in (((1,), 16), ((40,), 16), ((2, 13), 64), ((7, 1, 5), 1))
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
