"""The pool map shows the state of every block."""

import pytest

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore, finish


def naive_states(blocks):
    """Return the expected pool map, block by block."""
    free = set(range(blocks.num_blocks)) - {block for block, count in enumerate(blocks.pool._references) if count}
    marks = {block: "c" if blocks.pool.is_cached(block) else "." for block in free}
    held = {block: str(count) if count < 10 else "+" for block, count in enumerate(blocks.pool._references) if count}
    return "".join((marks | held)[block] for block in range(blocks.num_blocks))


@pytest.mark.parametrize("tables", [1, 2, 9, 10, 255, 256, 300])
def test_pool_map_shows_reference_count(tables):
    blocks = BlockManager(4, 4)
    first = []
    assert blocks.grow(first, 8)
    others = [blocks.fork(first[:1]) for _ in range(tables - 1)]
    mark = str(tables) if tables < 10 else "+"
    assert blocks.pool.states() == f"{mark}1.."
    assert (blocks.pool.states().count("."), len(others)) == (blocks.pool.num_free, tables - 1)


@pytest.mark.parametrize(("free", "cached", "held"), [(5, 0, 0), (0, 5, 0), (1, 3, 1), (3, 1, 1), (2, 2, 1), (0, 0, 5)])
def test_pool_map_distinguishes_free_and_cached(free, cached, held):
    """Only the smaller set is walked, so there are cases with more free and with more cached blocks."""
    blocks = BlockManager(free + cached + held, 4, caching=True)
    table = blocks.allocate(cached)
    tokens = list(range(4 * cached))
    chain = Chain(Origin(""))
    for index, block in enumerate(table):
        blocks.cache_block(block, chain, tokens, index)
    keep = blocks.allocate(held)
    blocks.free(table)
    assert blocks.pool.states() == naive_states(blocks)
    assert [blocks.pool.states().count(mark) for mark in ".c1"] == [free, cached, held]
    blocks.check([keep])


def test_eviction_is_lru_and_tail_first():
    sched = scheduler(num_blocks=8)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(100, 112), max_tokens=1))
    finish(sched, store, request(1, range(200, 212), max_tokens=1))
    assert sched.blocks.pool.num_cached == 6
    finish(
        sched, store, request(2, range(300, 312), max_tokens=1)
    )  # takes two free blocks, and evicts one of the first request
    assert sched.stats.evictions == 1

    def known(tokens):
        return len(sched.blocks.match(Chain(Origin("")), [*tokens, 0]).blocks)

    assert [known(range(start, start + 12)) for start in (100, 200, 300)] == [2, 3, 3]
