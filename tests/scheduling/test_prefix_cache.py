"""The prefix cache as requests see it: which blocks a prompt hits, and that no other content is hit."""

import random

import pytest

from paged_backend.scheduling.group import Group
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore, expected_tokens, finish, truncated_keys


def test_request_hits_blocks_of_finished_request():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    prompt = list(range(18))
    finish(sched, store, request(0, prompt))
    assert (sched.blocks.pool.num_used, sched.blocks.pool.num_cached) == (0, 6)
    sched.add(request(1, prompt))
    plan = sched.schedule()
    # Hits four full blocks, and one token of the fifth, which holds tokens 16 to 19. The last token is computed.
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(17, 1)]
    assert len(plan.transfers.copies) == 1
    assert sched.stats.cached_tokens == 17


def test_copy_of_a_step_that_fails_is_not_cached():
    """It was planned while the prompt was computed. The sample ends before the failure is known."""
    sched = scheduler()
    store = ShadowStore(sched, 5)
    sched.add(request(0, [1, 2, 3, 4, 5, 6], n=2, max_tokens=8))
    first = sched.schedule()
    result = store.run(first)
    second = sched.schedule()
    assert len(second.transfers.copies) == 1
    sched.commit(first, result)
    assert sched.end(0, 0)
    sched.fail(second, "device error")
    sched.check()
    other = request(1, [1, 2, 3, 4, 5, 6, 7], max_tokens=2)
    assert finish(sched, store, other)[1, 0] == expected_tokens(other, 0, 5)
    assert sched.stats.cached_tokens == 4


def test_last_blocks_of_beams_are_not_cached():
    """Most of them are dropped after a step, and would take the place of what others can use."""
    sched = scheduler()
    finish(sched, ShadowStore(sched, 5), request(0, list(range(6)), beam_width=3, max_tokens=6))
    (index,) = sched.blocks.pool.indexes
    assert {len(index.entry(block).tokens) for block in index.blocks} == {4}


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
    assert sched.blocks.pool.num_used == sched.blocks.pool.num_cached == 0


def test_eviction_is_lru_and_tail_first():
    sched = scheduler(num_blocks=8)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(100, 112), max_tokens=1))
    finish(sched, store, request(1, range(200, 212), max_tokens=1))
    assert sched.blocks.pool.num_cached == 6
    finish(sched, store, request(2, range(300, 312), max_tokens=1))  # has room for two blocks without an eviction
    assert sched.stats.evictions == 1

    def known(tokens):
        return sched.blocks.match(Group(request(9, [*tokens, 0])).leader, 13).num_blocks

    assert [known(range(start, start + 12)) for start in (100, 200, 300)] == [2, 3, 3]
