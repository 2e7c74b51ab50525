"""Contents: one entry per content, for as long as a block, a sequence or an entry refers to it, and their index."""

import gc
import random
import threading

import pytest

from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Chain, Contents, Entry, PrefixIndex
from tests.support.block_managers import cached, compute, manager, sequence

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
    blocks = manager(4, 1)
    one = cached(blocks, [1, 2, 3, 4])
    tail, heads = one.tables[0][3:], one.tables[0][:3]
    blocks.pool.free_table(heads)
    del one
    assert blocks.pool.allocate(3) is not None
    assert len(blocks.pool.indexes[0].blocks) == 1
    assert len(blocks.contents) == 4  # of evicted blocks too: a request that recomputes them finds the last one
    again = sequence(blocks, [1, 2, 3, 4, 5])
    blocks.match(again, 5)
    assert len(again.chain.entries) == 1  # none of the blocks before the last is cached
    blocks.pool.free_table(tail)
    blocks.pool.allocate(1)
    del again
    assert len(blocks.contents) == 0


@pytest.mark.parametrize("host", [0, 128])
@pytest.mark.parametrize("matching", [0.0, 0.5])
def test_number_of_entries_is_bounded_by_blocks(host, matching, figures):
    """Thousands of prompts branch everywhere, are computed or found in the cache, and are freed in any order."""
    rnd, length, most = random.Random(1), 16, 0
    blocks = manager(128, 1, host=host)
    held, past = [], [[0]]
    for number in range(1500):
        begins = rnd.choice(past)[: rnd.randrange(length)]
        tokens = [*begins, *(rnd.choice([number, rnd.randrange(3)]) for _ in range(length - len(begins)))]
        past = [*past[-30:], tokens]
        while held and (blocks.pool.num_available < 2 * length or rnd.random() < 0.3):
            blocks.free(held.pop(rnd.randrange(len(held))))
        one = sequence(blocks, tokens)
        if rnd.random() < matching:
            blocks.adopt(one, blocks.match(one, length))
        assert compute(blocks, one)
        held.append(one)
        most = max(most, len(blocks.contents))
    figures(f"at most {most} entries for {128 + host} blocks")
    assert most <= 2 * (128 + host)
    del one
    while held:
        blocks.free(held.pop())
    blocks.pool.free_table(blocks.pool.allocate(128))
    blocks.ledger.finish(blocks.ledger.take())
    if blocks.host:
        blocks.host.free_table(blocks.host.allocate(host))
    assert len(blocks.contents) == 0


def index_of(*contents):
    """Return an index of blocks 0, 1, ... with these tokens, all after the origin, and the contents."""
    index, known = PrefixIndex(), Contents()
    for block, tokens in enumerate(contents):
        assert index.add(block, chain_of(known, tokens, len(tokens)).entries[0])
    return index, known


def test_nearest_child_has_the_longest_common_prefix():
    """Compared with all children, one by one."""
    rnd = random.Random(2)
    for _ in range(100):
        contents = {tuple(rnd.randrange(3) for _ in range(4)) for _ in range(rnd.randint(1, 8))}
        index, known = index_of(*contents)
        wanted = tuple(rnd.randrange(3) for _ in range(rnd.randint(1, 4)))
        lengths = [next((at for at in range(len(wanted)) if one[at] != wanted[at]), len(wanted)) for one in contents]
        found = index.nearest_child(ORIGIN, wanted)
        if not max(lengths):
            assert found is None
        else:
            assert found[1] == max(lengths) == lengths[found[0]]
        index.check(known)


def test_removed_content_is_no_child():
    index, known = index_of([1, 2], [1, 3])
    entry = index.entry(0)
    assert index.remove(0) is entry
    assert index.nearest_child(ORIGIN, (1, 2)) == (1, 1)
    assert (index.find(entry), index.entry(0), index.contains(0)) == (None, None, False)
    index.remove(1)
    assert index.nearest_child(ORIGIN, (1, 2)) is None
    index.check(known)


def test_names_of_blocks_in_a_store_are_by_kind():
    entry = Entry(ORIGIN, (1, 2))
    assert BlockKey(entry).name == entry.key.hex()
    assert BlockKey(entry, 2).name == f"{entry.key.hex()}-2"
