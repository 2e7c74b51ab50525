"""Shared, copied, evicted and swapped blocks: no sequence reads the keys and values of another."""

import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.content import Chain
from paged_backend.scheduling.plan import Costs
from paged_backend.scheduling.prefix_cache import CacheHit
from tests.support.pool_machine import truncated_keys
from tests.support.scheduler_stress import CONDITIONS, request, run_stress, scheduler
from tests.support.shadow import ShadowStore, expected_tokens


def finish(sched, store, *requests):
    """Run requests to their end, and return their tokens by (key, index)."""
    for one in requests:
        sched.add(one)
    outputs = {}
    while sched.has_work:
        plan = sched.schedule()
        sched.check()
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    assert sched.blocks.num_used == 0
    return outputs


CONDITION_STRATEGIES = {"seed": st.integers(0, 2**32)} | {
    name: st.sampled_from(values) for name, values in CONDITIONS.items()
}
EVENTS = (  # each occurs in any run of the stress test
    "add", "abort while waiting", "abort while running", "abort in flight", "abort of unknown request",
    "end of a sample", "end of a session", "reset", "spill", "step", "failed step", "failed row",
    "failed moves", "no request fits",
    "beam output", "adapter output", "session output", "blocks from disk", "blocks to disk",
    "recomputed", "swapped", "cached_tokens", "host_tokens", "evictions", "copies", "moves_out", "moves_in",
    "draft_tokens", "accepted_tokens", "blocks_pinned",
)  # fmt: skip


@pytest.mark.parametrize("examples", [700, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_random_load_gives_each_sample_its_isolated_output(examples, figures, until):
    seen = Counter()

    @settings(max_examples=examples, deadline=None)
    @given(**CONDITION_STRATEGIES)
    def run(**conditions):
        if time.monotonic() < until:
            run_stress(seen, **conditions)

    run()
    assert all(seen[name] for name in EVENTS), seen
    figures(f"{seen['step']:,} steps of the scheduler, {seen['add']:,} requests, chosen by hypothesis")


@settings(max_examples=300, deadline=None)
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
    """2,000 prompts with few prefixes and two tenants use a small pool, a host pool and files. Keys have so few bits
    that most stand for several contents. A request that read a block of another content would get other tokens."""
    rnd, wrong = random.Random(bits), 0
    sched = scheduler(num_blocks=40, host=40)
    store = ShadowStore(sched, 97)
    pieces = [[rnd.randrange(97) for _ in range(4)] for _ in range(3)]
    with truncated_keys(bits):
        for first in range(0, 2000, 4):
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
    assert min(stats.cached_tokens, stats.host_tokens, stats.evictions) > 1000
    assert store.key_collisions > 100
    figures(
        f"{wrong} wrong tokens; {stats.cached_tokens:,} from the cache, colliding files {store.key_collisions:,} times"
    )


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


def test_samples_share_prompt_blocks_until_they_diverge():
    """18 tokens in blocks of 4: all samples share four full blocks, and two of three copy the partial one."""
    sched = scheduler()
    store = ShadowStore(sched, 97)
    one = request(0, range(18), max_tokens=4, n=3, seed=5)
    sched.add(one)
    plan = sched.schedule()
    assert len(plan.chunks) == 1
    assert len(plan.chunks[0].sampled_sequences) == 3
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.pool.num_shared) == (5, 5)
    plan = sched.schedule()
    assert len(plan.copies) == 2
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.pool.num_shared) == (7, 4)


def test_each_sample_equals_single_request_with_its_seed():
    sched = scheduler()
    store = ShadowStore(sched, 97)
    outputs = finish(sched, store, request(0, range(18), max_tokens=12, n=3, seed=5))
    for index in range(3):
        assert outputs[0, index] == expected_tokens(request(9, range(18), max_tokens=12, seed=5 + index), 0, 97)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_group_resumes_with_shared_blocks(caching):
    """Without sharing after the preemption, three samples of this prompt would not fit the pool."""
    sched = scheduler(num_blocks=10, caching=caching)
    store = ShadowStore(sched, 97)
    old, new = request(0, range(50, 58), max_tokens=24), request(1, range(18), max_tokens=7, n=3)
    outputs = finish(sched, store, old, new)
    assert sched.stats.preemptions > 0
    for one in (old, new):
        for index in range(one.sampling.n):
            assert outputs[one.key, index] == expected_tokens(one, index, 97)


def test_prefix_caching_disabled_caches_nothing():
    sched = scheduler(caching=False)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(20)), request(1, range(20)))
    finish(sched, store, request(2, range(20)))
    assert sched.stats.cached_tokens == 0
    assert sched.blocks.pool.num_free == sched.blocks.num_blocks


# --- host pool ---------------------------------------------------------------------------------------------------


def test_evicted_block_is_restored_from_host():
    sched = scheduler(num_blocks=8, host=16)
    store = ShadowStore(sched, 5)
    first = request(0, range(100, 118), max_tokens=3)
    finish(sched, store, first, request(1, range(200, 228), max_tokens=3))
    assert sched.stats.evictions > 0
    again = request(2, first.prompt_token_ids, max_tokens=3)
    computed = sched.stats.cached_tokens
    assert finish(sched, store, again)[2, 0] == expected_tokens(first, 0, 5)
    assert sched.stats.cached_tokens - computed == 17
    assert sched.stats.host_tokens > 0
    moved = sched.stats.moves_in
    finish(sched, store, request(3, first.prompt_token_ids, max_tokens=3))
    assert sched.stats.moves_in == moved  # the blocks are on the device now


def test_partial_hit_on_host_is_copied_to_device():
    sched = scheduler(num_blocks=6, host=16)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(100, 109)), request(1, range(200, 223), max_tokens=1))
    other = request(2, [*range(100, 106), 7, 7, 7])
    assert finish(sched, store, other)[2, 0] == expected_tokens(other, 0, 5)
    assert sched.stats.host_tokens == 6


def rivals():
    """Return two requests that fit the pool together only at first."""
    return request(0, range(50, 62), max_tokens=20), request(1, range(10, 19), max_tokens=20, n=2, seed=3)


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_request_is_not_recomputed(caching):
    sched = scheduler(num_blocks=14, host=32, caching=caching)
    store = ShadowStore(sched, 97)
    for one in rivals():
        sched.add(one)
    computed, outputs = 0, {}
    while sched.has_work:
        plan = sched.schedule()
        computed += plan.num_tokens
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    assert sched.stats.swapped > 0
    assert sched.stats.recomputed == 0
    assert computed == 12 + 19 + 9 + 2 * 19
    for one in rivals():
        for index in range(one.sampling.n):
            assert outputs[one.key, index] == expected_tokens(one, index, 97)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"host": 32}, "swapped"),
        ({"host": 32, "preemption": "recompute"}, "recomputed"),
        ({"host": 32, "preemption": "swap", "costs": Costs(token=1, move=9)}, "swapped"),
        ({"host": 32, "costs": Costs(token=1, move=3)}, "recomputed"),  # 2 * 3 a block, which holds 4 tokens
        ({"host": 32, "costs": Costs(token=1, move=1)}, "swapped"),
        ({"host": 2}, "recomputed"),  # no room on the host
        ({}, "recomputed"),
    ],
)
def test_preemption_picks_cheaper_of_swap_and_recompute(options, kind):
    sched = scheduler(num_blocks=14, caching=False, **options)
    finish(sched, ShadowStore(sched, 97), *rivals())
    assert {kind: sched.stats.preemptions} == {
        name: count for name in ("swapped", "recomputed") if (count := getattr(sched.stats, name))
    }


def test_failed_swap_out_loses_no_token():
    """The request that was being swapped out is recomputed; the requests of the step end."""
    sched = scheduler(num_blocks=14, host=32, caching=False)
    store = ShadowStore(sched, 97)
    old, new = rivals()
    sched.add(old)
    sched.add(new)
    outputs = {}
    while True:
        plan = sched.schedule()
        if plan.moves_out:
            break
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
    assert [delta.key for delta in sched.fail(plan, "out of order")] == [0]
    sched.check()
    for key, tokens in finish(sched, store).items():
        outputs[key] += tokens
    assert [outputs[1, index] for index in range(2)] == [expected_tokens(new, index, 97) for index in range(2)]


def test_swapped_request_can_be_aborted():
    sched = scheduler(num_blocks=14, host=32)
    store = ShadowStore(sched, 97)
    for one in rivals():
        sched.add(one)
    while not sched.stats.swapped:
        plan = sched.schedule()
        sched.commit(plan, store.run(plan))
    assert sched.stats.host_used > 0
    assert sched.abort(1)
    sched.check()
    assert sched.stats.host_used == 0


# --- sessions ----------------------------------------------------------------------------------------------------


def test_session_pins_blocks_between_turns():
    """Other requests fill the pool with cached blocks; without pins, those of the session would be evicted."""
    sched = scheduler(num_blocks=16, session_blocks=8)
    store = ShadowStore(sched, 97)
    first = request(0, range(100, 117), max_tokens=5, session="chat")
    answer = finish_with_pins(sched, store, first)[0, 0]
    assert sched.stats.blocks_pinned == sched.blocks.num_used == 5
    for key in range(1, 6):
        finish_with_pins(sched, store, request(key, range(200 * key, 200 * key + 40)))
    cached = sched.stats.cached_tokens
    finish_with_pins(sched, store, request(9, [*first.prompt_token_ids, *answer, 7, 7], session="chat"))
    assert sched.stats.cached_tokens - cached >= 20
    sched.pins.drop("chat")
    sched.check()
    assert sched.blocks.num_used == 0


def finish_with_pins(sched, store, one):
    sched.add(one)
    outputs = {}
    while sched.has_work:
        plan = sched.schedule()
        for delta in sched.commit(plan, store.run(plan)):
            outputs.setdefault((delta.key, delta.sample), []).extend(delta.token_ids)
        sched.check()
    return outputs


def test_pin_limit_unpins_least_recently_used_session():
    sched = scheduler(num_blocks=32, session_blocks=8)
    store = ShadowStore(sched, 97)
    for key, name in enumerate("abca"):
        finish_with_pins(sched, store, request(key, range(100 * key, 100 * key + 12), max_tokens=1, session=name))
    assert sched.stats.blocks_pinned == 6
    held = sched.blocks.num_used
    sched.pins.drop("b")
    assert sched.blocks.num_used == held


def test_sessions_are_unpinned_before_preemption():
    sched = scheduler(num_blocks=8, session_blocks=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 116), max_tokens=1, session="chat"))
    assert sched.stats.blocks_pinned == 4
    finish_with_pins(sched, store, request(1, range(200, 212), max_tokens=18))
    assert sched.stats.blocks_pinned == 0
    assert sched.stats.preemptions == 0


def test_sessions_are_unpinned_before_lower_priority_is_preempted():
    """A request takes the blocks of idle sessions, not those of a running request of lower priority."""
    sched = scheduler(num_blocks=12, session_blocks=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 124), max_tokens=1, session="chat"))
    sched.add(request(1, range(200, 206), max_tokens=3, priority=5))
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    finish_with_pins(sched, store, request(2, range(300, 320), max_tokens=1))
    assert sched.stats.blocks_pinned == 0
    assert sched.stats.preemptions == 0


def test_session_pins_do_not_block_request_needing_whole_pool():
    sched = scheduler(num_blocks=8, session_blocks=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 116), max_tokens=1, session="chat"))
    assert finish_with_pins(sched, store, request(1, range(200, 232), max_tokens=1))


def test_pool_map_shows_blocks_only_pinned_by_sessions():
    sched = scheduler(num_blocks=8, session_blocks=8)
    store = ShadowStore(sched, 97)
    finish_with_pins(sched, store, request(0, range(100, 108), max_tokens=1, session="chat"))
    assert sorted(sched.blocks.pool.states(sched.pins.counts)) == sorted("pp......")
    sched.add(request(1, [*range(100, 108), 5, 6], session="chat"))
    sched.schedule()
    assert sorted(sched.blocks.pool.states(sched.pins.counts)) == sorted("221.....")


def test_sample_ending_during_shared_prefill():
    """The leader ends with the step in flight: the other samples go on, and the cached blocks are right."""
    sched = scheduler()
    store = ShadowStore(sched, 97)
    one = request(0, range(100, 109), max_tokens=6, n=3)
    sched.add(one)
    plan = sched.schedule()
    result = store.run(plan)
    assert sched.end(0, 0)
    deltas = sched.commit(plan, result)
    sched.check()
    assert [delta.sample for delta in deltas] == [1, 2]
    assert sched.blocks.pool.index.blocks >= set(sched.running[0].leader.blocks[:2])  # the full blocks of the prompt
    outputs = finish(sched, store)
    assert {key: [*deltas[key[1] - 1].token_ids, *rest] for key, rest in outputs.items()} == {
        (0, index): expected_tokens(one, index, 97) for index in (1, 2)
    }
    assert finish(sched, store, request(1, range(100, 109)))[1, 0] == expected_tokens(
        request(1, range(100, 109)), 0, 97
    )
    assert sched.stats.cached_tokens == 8


def test_no_preemption_if_request_still_would_not_fit():
    """Of 12 blocks, a higher priority holds 8 and a lower one 2; the waiting request needs 6."""
    sched = scheduler(num_blocks=12, max_num_batched_tokens=64)
    store = ShadowStore(sched, 97)
    above = request(0, range(100, 131), max_tokens=2, priority=-5)
    below = request(1, range(200, 207), max_tokens=2, priority=5)
    for one in (above, below):
        sched.add(one)
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    assert sched.blocks.num_used == 10
    sched.add(request(2, range(300, 323), max_tokens=1, priority=0))
    plan = sched.schedule()
    assert sched.stats.preemptions == 0
    sched.commit(plan, store.run(plan))
    assert finish(sched, store)
    assert sched.stats.preemptions == 0


def test_resumed_request_does_not_count_cache_hits():
    sched = scheduler(num_blocks=14)
    finish(sched, ShadowStore(sched, 97), *rivals())
    assert sched.stats.preemptions > 0
    assert sched.stats.cached_tokens == 0
