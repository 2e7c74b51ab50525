"""Changes of the prefix cache, as listeners of the pools see them."""

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.cache_events import DEVICE, HOST, CacheEvents
from paged_backend.scheduling.content import Chain

SIZE = 4


def cached(blocks, tokens):
    """Cache the full blocks of these tokens, and return their block table."""
    chain, table = Chain(Origin("")), []
    assert blocks.grow(table, len(tokens))
    for index in range(len(tokens) // SIZE):
        blocks.cache.add(table[index], chain, tokens, index)
    return table


def test_cached_and_evicted_contents_are_events():
    events = CacheEvents()
    blocks = BlockManager(2, SIZE, caching=True, listener=events.listener(DEVICE))
    table = cached(blocks, list(range(8)))
    stored = events.take()
    assert [(event.stored, event.entry.tokens, event.medium) for event in stored] == [
        (True, (0, 1, 2, 3), DEVICE),
        (True, (4, 5, 6, 7), DEVICE),
    ]
    assert stored[1].entry.parent is stored[0].entry
    assert events.take() == []
    blocks.free(table)
    assert events.take() == []  # the blocks keep their contents
    cached(blocks, [9] * 4)
    removed, added = events.take()
    assert (removed.stored, removed.entry) == (False, stored[1].entry)  # the tail is evicted first
    assert (added.stored, added.entry.tokens) == (True, (9, 9, 9, 9))


def test_contents_of_the_host_have_their_own_medium():
    events = CacheEvents()
    host = BlockPool(2, caching=True, listener=events.listener(HOST))
    blocks = BlockManager(1, SIZE, caching=True, host=host, listener=events.listener(DEVICE))
    blocks.free(cached(blocks, [1] * 4))
    events.take()
    blocks.free(cached(blocks, [2] * 4))
    assert [(event.stored, event.entry.tokens[0], event.medium) for event in events.take()] == [
        (True, 1, HOST),
        (False, 1, DEVICE),
        (True, 2, DEVICE),
    ]
