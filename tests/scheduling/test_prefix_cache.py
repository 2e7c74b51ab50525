"""The prefix cache: which blocks a prompt hits, and that no other content is hit."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from paged_backend.scheduling.prefix_cache import CacheHit
from tests.support.pool_machine import truncated_keys
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore, expected_tokens, finish


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_match_finds_longest_cached_prefix(seed, size):
    """Compared with all cached prefixes, one by one."""
    rnd = random.Random(seed)
    blocks = BlockManager(16, size, caching=True)
    held = []
    for _ in range(30):
        tokens, salt = [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.choice("ab")
        chain = Chain(Origin(salt))
        hit = blocks.match(chain, tokens)
        assert len(hit.blocks) * size + hit.partial_tokens == longest(blocks, salt, tokens)
        table, _, _ = blocks.adopt(CacheHit(hit.blocks))
        if blocks.grow(table, len(tokens)):
            for index in range(len(tokens) // size):
                blocks.cache_block(table[index], chain, tokens, index)
        held.append(table)
        blocks.check(held)
        while held and rnd.random() < 0.5:
            blocks.free(held.pop(rnd.randrange(len(held))))
            blocks.check(held)


def longest(blocks, salt, tokens):
    """Return the length of the longest cached prefix, by brute force over all cached blocks."""
    most, size = len(tokens) - 1, blocks.block_size
    prefixes = [blocks.pool.index.entry(block).prefix for block in blocks.pool.index.blocks]
    known = [content for origin, content in prefixes if origin == Origin(salt)]
    found = 0
    while found + size <= most and tokens[: found + size] in known:
        found += size
    rest = tokens[found:most]
    partial = [content[found:] for content in known if content[:-size] == tokens[:found]]
    return found + max(
        (next((i for i, (a, b) in enumerate(zip(one, rest, strict=False)) if a != b), min(len(one), len(rest))))
        for one in [*partial, ()]
    )


def test_request_hits_blocks_of_finished_request():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    prompt = list(range(18))
    finish(sched, store, request(0, prompt))
    assert (sched.blocks.pool.num_free, sched.blocks.pool.num_cached) == (27, 5)
    sched.add(request(1, prompt))
    plan = sched.schedule()
    # Hits four full blocks, and one token of the fifth, which holds tokens 16 to 19. The last token is computed.
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(17, 1)]
    assert len(plan.copies) == 1
    assert sched.stats.cached_tokens == 17


def test_partial_hit_copies_block_and_keeps_source():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    first = request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert finish(sched, store, first)[0, 0] == expected_tokens(first, 0, 5)
    second = request(1, [1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert finish(sched, store, second)[1, 0] == expected_tokens(second, 0, 5)
    assert sched.stats.copies == 1
    assert sched.stats.cached_tokens == 6
    assert finish(sched, store, request(2, first.prompt_token_ids))[2, 0] == expected_tokens(first, 0, 5)


def test_cache_salts_isolate_prefixes():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(20), cache_salt="a"))
    finish(sched, store, request(1, range(20), cache_salt="b"), request(2, range(20)))
    assert sched.stats.cached_tokens == 0
    finish(sched, store, request(3, range(20), cache_salt="a"))
    assert sched.stats.cached_tokens > 0


@pytest.mark.parametrize("bits", [4, 8])
def test_key_collisions_do_not_share_blocks(bits, figures):
    """600 prompts with few prefixes and two tenants use a small pool, a host pool and files. Keys have so few bits
    that most stand for several contents. A request that read a block of another content would get other tokens."""
    rnd, wrong = random.Random(bits), 0
    sched = scheduler(num_blocks=40, host=40)
    store = ShadowStore(sched, 97)
    pieces = [[rnd.randrange(97) for _ in range(4)] for _ in range(3)]
    with truncated_keys(bits):
        for first in range(0, 600, 4):
            asked = []
            for key in range(first, first + 4):
                prompt = [token for _ in range(rnd.randint(1, 6)) for token in rnd.choice(pieces)]
                asked.append(request(key, [*prompt, key % 97], 2, cache_salt=rnd.choice(["", "tenant"])))
                store.fetch(asked[-1])
            outputs = finish(sched, store, *asked)
            wrong += sum(outputs[one.key, 0] != expected_tokens(one, 0, 97) for one in asked)
            store.spill(4)
    stats = sched.stats
    assert wrong == 0
    assert min(stats.cached_tokens, stats.host_tokens, stats.evictions) > 250
    assert store.key_collisions > 20
    figures(
        f"{wrong} wrong tokens; {stats.cached_tokens:,} from the cache, colliding files {store.key_collisions:,} times"
    )


def test_prefix_caching_disabled_caches_nothing():
    sched = scheduler(caching=False)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(20)), request(1, range(20)))
    finish(sched, store, request(2, range(20)))
    assert sched.stats.cached_tokens == 0
    assert sched.blocks.pool.num_free == sched.blocks.num_blocks
