"""The pool map shows the state of every block."""

import pytest

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain


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
    """Both where more blocks are free and where more are cached: only the smaller set is walked."""
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
