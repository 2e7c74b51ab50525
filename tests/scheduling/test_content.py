"""Entries: one object per content, for as long as a block, a sequence or an entry refers to it."""

import gc
import random
import threading

import pytest

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.content import Chain, Contents, Entry

ORIGIN = Origin("")


def chain_of(contents, tokens, block_size=1, origin=ORIGIN):
    chain = Chain(origin)
    contents.extend(chain, tokens, len(tokens) // block_size, block_size)
    return chain


def test_equal_content_shares_one_entry():
    contents = Contents()
    one, same = (chain_of(contents, [1, 2, 3, 4], 2) for _ in range(2))
    assert all(a is b for a, b in zip(one.entries, same.entries, strict=True))
    others = [
        chain_of(contents, [1, 9, 3, 4], 2),
        chain_of(contents, [3, 4], 2),
        chain_of(contents, [1, 2, 3, 4], 2, Origin("tenant")),
        chain_of(contents, [1, 2, 3, 4], 2, Origin("", b"adapter")),
    ]
    assert len({chain.entries[-1] for chain in (one, *others)}) == 5
    assert one.entries[-1].prefix == (ORIGIN, [1, 2, 3, 4])
    assert others[2].entries[-1].prefix == (Origin("tenant"), [1, 2, 3, 4])


def test_key_depends_on_origin_tokens_and_block_size():
    ways = [
        chain_of(Contents(), *each)
        for each in (([1, 2, 3, 4], 2), ([1, 2, 3, 4], 4), ([1, 2, 4, 3], 2), ([1, 2, 3, 4], 2, Origin("tenant")),
                     ([1, 2, 3, 4], 2, Origin("", b"tenant")))
    ]  # fmt: skip
    assert len({chain.entries[-1].key for chain in ways}) == len(ways)
    alone = Entry(Entry(ORIGIN, (1, 2)), (3, 4))
    assert alone.key == alone.key == ways[0].entries[-1].key


@pytest.mark.parametrize("by_the_collector", [False, True])
def test_chain_of_100_000_blocks_does_not_recurse(by_the_collector):
    """Recursion over the blocks would overflow the stack."""
    length, left = 100_000, []

    def live():
        contents = Contents()
        last = chain_of(contents, range(length)).entries[-1]  # keeps all entries before it alive
        assert len(contents) == length
        assert last.prefix == (ORIGIN, list(range(length)))
        assert len(last.key) == 32
        if by_the_collector:
            ring = [last]
            ring.append(ring)
            del ring
        del last
        if by_the_collector:
            gc.collect()
        left.append(len(contents))

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=live)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert left == [0]


def test_entry_keeps_its_prefix_alive_and_nothing_else():
    blocks = BlockManager(4, 1, caching=True)
    table, chain = blocks.allocate(4), Chain(ORIGIN)
    for index in range(4):
        blocks.cache_block(table[index], chain, [1, 2, 3, 4], index)
    tail, heads = table[3:], table[:3]
    blocks.free(heads)
    del chain
    assert blocks.allocate(3) is not None
    assert len(blocks.pool.index.blocks) == 1
    assert len(blocks.cache.contents) == 4  # of evicted blocks too: a request that recomputes them finds the last one
    again = Chain(ORIGIN)
    blocks.match(again, [1, 2, 3, 4, 5])
    assert len(again.entries) == 1  # none of the blocks before the last is cached
    blocks.free(tail)
    blocks.allocate(1)
    del again
    assert len(blocks.cache.contents) == 0


@pytest.mark.parametrize("host", [0, 128])
@pytest.mark.parametrize("matching", [0.0, 0.5])
def test_number_of_entries_is_bounded_by_blocks(host, matching, figures):
    """Thousands of prompts branch everywhere, are computed or found in the cache, and are freed in any order."""
    rnd, length, most = random.Random(1), 16, 0
    behind = BlockPool(host, caching=True) if host else None
    blocks = BlockManager(128, 1, caching=True, host=behind)
    held, past = [], [[0]]
    for number in range(1500):
        begins = rnd.choice(past)[: rnd.randrange(length)]
        tokens = [*begins, *(rnd.choice([number, rnd.randrange(3)]) for _ in range(length - len(begins)))]
        past = [*past[-30:], tokens]
        while held and (blocks.num_available < 2 * length or rnd.random() < 0.3):
            blocks.free(held.pop(rnd.randrange(len(held))))
        chain, table, moves = Chain(ORIGIN), [], []
        if rnd.random() < matching:
            table, moves, copies = blocks.adopt(blocks.match(chain, tokens))
            blocks.finish_copies(copies)
        assert blocks.grow(table, length)
        blocks.offload.finish_moves_out(blocks.offload.take_moves_out())
        blocks.offload.finish_moves_in(moves)
        for index in range(length):
            blocks.cache_block(table[index], chain, tokens, index)
        held.append(table)
        most = max(most, len(blocks.cache.contents))
    figures(f"at most {most} entries for {128 + host} blocks")
    assert most <= 2 * (128 + host)
    del chain
    for table in held:
        blocks.free(table)
    blocks.free(blocks.allocate(128))
    blocks.offload.finish_moves_out(blocks.offload.take_moves_out())
    if behind:
        behind.free_table(behind.allocate(host))
    assert len(blocks.cache.contents) == 0
