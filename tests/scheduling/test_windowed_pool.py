"""Blocks that leave a sliding window give their window pages back to the pool."""

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from paged_backend.scheduling.windowed_pool import make_pool
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore, finish

LAYOUT = BlockLayout(4, base_pages=1, window_pages=2, window=6, max_pending=16)


def manager(pages=60, host=0, layout=LAYOUT):
    behind = make_pool(host, layout, caching=True) if host else None
    return BlockManager(pages, layout.block_size, layout=layout, caching=True, host=behind)


def cached_table(blocks, tokens, start=0):
    """Return the table of a sequence whose blocks are cached, trimmed up to block `start`."""
    table, chain = [], Chain(Origin(""))
    assert blocks.grow(table, len(tokens))
    for index, block in enumerate(table):
        blocks.cache_block(block, chain, tokens, index)
    blocks.trim(table, 0, start)
    return table


def match(blocks, tokens):
    return blocks.match(Chain(Origin("")), [*tokens, -1])


def test_a_sequence_holds_what_its_queries_see():
    sched = scheduler(64, 4, window=6, pages=(1, 2), caching=False)
    store = ShadowStore(sched, 5)
    sched.add(request(0, range(50), max_tokens=30))
    held = []
    while sched.has_work:
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
        held += [(group.leader.computed, sched.blocks.num_used) for group in sched.running]
    for computed, pages in held:
        full, first = -(-computed // 4), max(0, computed // 4 * 4 - 5) // 4
        assert pages == full + 2 * (full - first)
    assert max(pages for _, pages in held[-20:]) <= 20 + 2 * 3


def test_a_pool_without_room_for_whole_blocks_serves_a_long_sequence():
    """40 blocks of three pages would need 120 pages."""
    sched = scheduler(60, 4, window=6, pages=(1, 2), max_num_batched_tokens=8)
    outputs = finish(sched, ShadowStore(sched, 5), request(0, range(150), max_tokens=10))
    assert len(outputs[0, 0]) == 10


def test_window_pages_are_evicted_before_blocks():
    blocks = manager(15)
    blocks.free(cached_table(blocks, range(20), start=3), start=3)
    assert (blocks.pool.num_free, blocks.pool.num_cached) == (0, 15)
    others = blocks.allocate(2)
    assert others and match(blocks, range(20)).blocks  # six window pages, of the blocks outside of the window
    assert len(match(blocks, range(20)).blocks) == 5
    blocks.free(others)
    blocks.check([])


def test_prefix_without_its_window_is_no_hit():
    blocks = manager()
    table = cached_table(blocks, range(24))
    assert len(match(blocks, range(12)).blocks) == 3
    blocks.trim(table, 0, 3)
    evict_windows(blocks)
    assert match(blocks, range(12)).blocks == ()  # a query after them sees blocks 1 and 2
    hit = match(blocks, range(24))  # sees blocks 4 and 5
    assert (len(hit.blocks), hit.window_start) == (6, 4)
    blocks.free(table, start=3)


def evict_windows(blocks):
    """Evict all window pages that are cached alone."""
    free = blocks.pool.num_free
    held = blocks.pool.allocate(free, trimmed=free)
    more = blocks.pool.allocate(blocks.num_available, trimmed=blocks.num_available)
    for table in (held, more):
        blocks.free(table, start=len(table))


def test_content_with_window_pages_replaces_the_same_without():
    """Otherwise a prefix would be computed again by each request, once its window pages have been evicted."""
    blocks = manager()
    table = cached_table(blocks, range(12), start=3)
    evict_windows(blocks)
    again = cached_table(blocks, range(12))
    assert [location.block for location in match(blocks, range(12)).blocks] == again
    blocks.free(table, start=3)
    blocks.free(again)
    blocks.check([])


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_swap_out_does_not_use_a_block_of_the_host_without_window_pages(is_trimmed):
    blocks = manager(host=60)
    chain = Chain(Origin(""))
    entry = blocks.cache.entry(chain, range(4), 0)
    there = blocks.offload.add_host_block(entry, trimmed=is_trimmed)
    table = cached_table(blocks, range(4))
    (swapped,) = blocks.offload.swap_out([table])
    assert (swapped == [there]) == (not is_trimmed)
    assert swapped[0] not in blocks.host.trimmed
    blocks.offload.finish_moves_out(blocks.offload.take_moves_out())
    blocks.host.free_table(swapped)
    blocks.check([])


def test_evicted_blocks_without_window_pages_have_none_in_the_host_pool():
    blocks = manager(host=60)
    table = cached_table(blocks, range(12), start=3)
    evict_windows(blocks)
    blocks.free(table, start=3)
    evicting = blocks.pool.allocate(blocks.pool.num_available // 3)
    blocks.offload.finish_moves_out(blocks.offload.take_moves_out())
    assert len(blocks.host.trimmed) == 3
    assert match(blocks, range(12)).blocks == ()  # a query after them sees window pages, which were not moved
    blocks.free(evicting)
    blocks.check([])


def test_swap_in_does_not_use_a_cached_block_without_window_pages():
    blocks = manager(host=60)
    other = cached_table(blocks, range(4))
    table = blocks.fork(other)
    swapped = blocks.offload.swap_out([table])
    blocks.offload.finish_moves_out(blocks.offload.take_moves_out())
    blocks.trim(other, 0, 1)
    evict_windows(blocks)
    (back,), moves = blocks.offload.swap_in(swapped)
    assert back != other
    assert back[0] not in blocks.pool.trimmed
    assert [len(move.pages) for move in moves] == [3]
    blocks.offload.finish_moves_in(moves)
    blocks.free(back)
    blocks.free(other, start=1)
    blocks.check([])


def test_pool_map_shows_every_page():
    blocks = manager(9)
    table = cached_table(blocks, range(8))
    fork = blocks.fork(table)
    blocks.trim(table, 0, 1)
    first, second = (blocks.pool.pages_of(block) for block in table)
    states = blocks.pool.states()
    assert [states[page] for page in first + second] == ["2", "1", "1", "2", "2", "2"]
    assert states.count(".") == 3
    blocks.free(table, start=1)
    blocks.free(fork)
    assert blocks.pool.states().count("c") == 6
    pinned = blocks.allocate(1)
    assert blocks.pool.states({pinned[0]: 1}).count("p") == 3
    blocks.free(pinned)


def test_blocks_of_window_pages_alone_lose_their_content_with_them():
    layout = BlockLayout(4, base_pages=0, window_pages=1, window=6, max_pending=16)
    blocks = manager(6, layout=layout)
    table = cached_table(blocks, range(24), start=4)
    assert blocks.num_available == 4
    hog = blocks.allocate(4)
    assert hog
    hit = match(blocks, range(24))
    assert (len(hit.blocks), hit.window_start, hit.device_blocks) == (6, 4, table[4:])
    blocks.free(hog)
    blocks.free(table, start=4)
    adopted, moves, copies = blocks.adopt(match(blocks, range(24)))
    assert (adopted[4:], moves, copies) == (hit.device_blocks, [], [])
    blocks.free(adopted, start=4)
    blocks.check([])
    assert blocks.num_used == 0
