"""Sharing, copying and forgetting blocks: nobody ever reads what is not theirs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.block_manager import BlockManager, root_key
from paged_backend.request import GenerateRequest, SamplingParams, blocks_at_most
from paged_backend.scheduler import Scheduler
from tests.shadow import ShadowStore, alone

STOP = 3


def scheduler(num_blocks=32, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, caching=True):
    blocks = BlockManager(num_blocks, block_size, caching=caching)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def request(key, prompt, max_tokens=4, stop_ids=frozenset(), seed=0, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(key, tuple(prompt), params, seed, frozenset(stop_ids))


def finish(sched, store, *requests):
    """Run requests to their end; their tokens by (key, index)."""
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


@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(3, 24),
    size=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 6),
    extra=st.integers(0, 20),
    caching=st.booleans(),
    vocab=st.sampled_from([2, 3, 5]),
)
def test_any_storm_gives_each_sample_the_tokens_it_gets_alone(seed, blocks, size, seqs, extra, caching, vocab):
    """Two tokens and two salts, so that prefixes collide all the time; forks, aborts, ends and dry pools between."""
    rnd = random.Random(seed)
    sched = scheduler(blocks, size, seqs, seqs + extra, caching)
    store = ShadowStore(sched, vocab)
    requests, outputs, left = {}, {}, 25
    for _ in range(5000):
        while left and rnd.random() < 0.4:
            left -= 1
            n = rnd.randint(1, min(3, seqs))
            prompt = [rnd.randrange(2) for _ in range(rnd.randint(1, blocks * size))]
            longest = max(0, blocks * size - len(prompt) + 1)
            while longest and blocks_at_most(len(prompt), longest, n, size) > blocks:
                longest -= 1
            if longest:
                salt = rnd.choice(["", "tenant"])
                max_tokens, stops = rnd.randint(1, longest), {vocab - 1} if rnd.random() < 0.3 else set()
                choice = {"n": n, "cache_salt": salt, "priority": rnd.choice([0, 0, 0, -1, 5])}
                one = request(25 - left, prompt, max_tokens, stops, seed=rnd.randrange(100), **choice)
                requests[one.key] = one
                outputs |= {(one.key, index): [] for index in range(n)}
                sched.add(one)
        requests = {key: one for key, one in requests.items() if any(owner == key for owner, _ in outputs)}
        if requests and rnd.random() < 0.05:
            key = rnd.choice(sorted(requests))
            assert sched.abort(key)
            sched.check()
            forget(requests, outputs, key)
        if outputs and rnd.random() < 0.05:
            key, index = rnd.choice(sorted(outputs))
            if outputs[key, index] and sched.end(key, index):
                sched.check()
                del outputs[key, index]
        plan = sched.schedule()
        sched.check()
        if plan is None:
            assert not sched.has_work
            if not left:
                break
            continue
        assert plan.num_tokens <= sched.max_num_batched_tokens
        for delta in sched.commit(plan, store.run(plan)):
            outputs[delta.key, delta.sample] += delta.token_ids
            if delta.finish:
                one = requests[delta.key]
                assert outputs.pop((delta.key, delta.sample)) == alone(one, delta.sample, vocab)
        sched.check()
        assert sched.blocks.num_used * size - sched.empty_slots == tokens_held(sched)
    assert not left
    assert sched.blocks.num_used == 0
    sched.blocks.forget()
    assert sched.blocks.num_free == blocks


def tokens_held(sched):
    """Slots of the pool that hold a token of a sequence, counted one by one."""
    size = sched.blocks.block_size
    return len(
        {
            (one.blocks[position // size], position % size)
            for group in sched.running
            for one in group.sequences
            for position in range(one.computed)
        }
    )


def forget(requests, outputs, key):
    del requests[key]
    for owner in [owner for owner in outputs if owner[0] == key]:
        del outputs[owner]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_a_match_is_the_longest_that_any_block_allows(seed, size):
    """Against all prefixes that were ever sealed and not evicted, one by one."""
    rnd = random.Random(seed)
    blocks = BlockManager(16, size, caching=True)
    held = []
    for _ in range(30):
        tokens, salt = [rnd.randrange(2) for _ in range(rnd.randint(1, 12))], rnd.choice("ab")
        chain = [root_key(salt)]
        hit = blocks.match(chain, tokens)
        assert len(hit.blocks) * size + hit.partial_tokens == longest(blocks, salt, tokens)
        table = blocks.adopt(hit)
        if blocks.grow(table, len(tokens)):
            for index in range(len(tokens) // size):
                blocks.seal(table[index], chain, tokens, index)
        held.append(table)
        blocks.check(held)
        while held and rnd.random() < 0.5:
            blocks.release(held.pop(rnd.randrange(len(held))))
            blocks.check(held)


def longest(blocks, salt, tokens):
    """By brute force over what the manager says that its blocks hold."""
    most, size, key = len(tokens) - 1, blocks.block_size, root_key(salt)
    known = {(blocks._parents[block], content): blocks._keys[block] for block, content in blocks._tokens.items()}
    found = 0
    while found + size <= most and (key, tuple(tokens[found : found + size])) in known:
        key, found = known[key, tuple(tokens[found : found + size])], found + size
    rest = tokens[found:most]
    partial = [content for parent, content in known if parent == key]
    return found + max(
        (next((i for i, (a, b) in enumerate(zip(one, rest, strict=False)) if a != b), min(len(one), len(rest))))
        for one in [*partial, ()]
    )


def test_a_later_request_finds_the_blocks_of_an_ended_one():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    prompt = list(range(18))
    finish(sched, store, request(0, prompt))
    assert (sched.blocks.num_free, sched.blocks.num_cached) == (27, 5)
    sched.add(request(1, prompt))
    plan = sched.schedule()
    # Four full blocks, and one token of the fifth, which holds the first one's 16th to 19th: the last is computed.
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(17, 1)]
    assert len(plan.copies) == 1
    assert sched.stats.cached_tokens == 17


def test_a_partial_hit_copies_the_block_and_leaves_the_source_alone():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    first = request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert finish(sched, store, first)[0, 0] == alone(first, 0, 5)
    second = request(1, [1, 2, 3, 4, 5, 6, 0, 0, 0])
    assert finish(sched, store, second)[1, 0] == alone(second, 0, 5)
    assert sched.stats.copies == 1
    assert sched.stats.cached_tokens == 6
    assert finish(sched, store, request(2, first.prompt_token_ids))[2, 0] == alone(first, 0, 5)


def test_salts_share_nothing():
    sched = scheduler()
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(20), cache_salt="a"))
    finish(sched, store, request(1, range(20), cache_salt="b"), request(2, range(20)))
    assert sched.stats.cached_tokens == 0
    finish(sched, store, request(3, range(20), cache_salt="a"))
    assert sched.stats.cached_tokens > 0


def test_eviction_takes_the_least_recently_used_and_a_tail_before_its_head():
    sched = scheduler(num_blocks=8)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(100, 112), max_tokens=1))
    finish(sched, store, request(1, range(200, 212), max_tokens=1))
    assert sched.blocks.num_cached == 6
    finish(sched, store, request(2, range(300, 312), max_tokens=1))  # two free blocks, and one of the first's
    assert sched.stats.evictions == 1

    def known(tokens):
        return len(sched.blocks.match([root_key("")], [*tokens, 0]).blocks)

    assert [known(range(start, start + 12)) for start in (100, 200, 300)] == [2, 3, 3]


def test_samples_share_the_prompt_and_part_where_they_differ():
    """18 tokens in blocks of 4: four full blocks shared by all, a partial one that two of three samples copy."""
    sched = scheduler()
    store = ShadowStore(sched, 97)
    one = request(0, range(18), max_tokens=4, n=3, seed=5)
    sched.add(one)
    plan = sched.schedule()
    assert len(plan.chunks) == 1
    assert len(plan.chunks[0].draws) == 3
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.num_shared) == (5, 5)
    plan = sched.schedule()
    assert len(plan.copies) == 2
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.num_shared) == (7, 4)


def test_each_sample_is_what_a_request_of_its_seed_gets_alone():
    sched = scheduler()
    store = ShadowStore(sched, 97)
    outputs = finish(sched, store, request(0, range(18), max_tokens=12, n=3, seed=5))
    for index in range(3):
        assert outputs[0, index] == alone(request(9, range(18), max_tokens=12, seed=5 + index), 0, 97)


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_group_comes_back_with_its_blocks_shared(caching):
    """Without sharing on the way back, three samples of this prompt would never fit the pool again."""
    sched = scheduler(num_blocks=10, caching=caching)
    store = ShadowStore(sched, 97)
    old, new = request(0, range(50, 58), max_tokens=24), request(1, range(18), max_tokens=7, n=3)
    outputs = finish(sched, store, old, new)
    assert sched.stats.preemptions > 0
    for one in (old, new):
        for index in range(one.sampling.n):
            assert outputs[one.key, index] == alone(one, index, 97)


def test_without_caching_nothing_is_remembered():
    sched = scheduler(caching=False)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(20)), request(1, range(20)))
    finish(sched, store, request(2, range(20)))
    assert sched.stats.cached_tokens == 0
    assert sched.blocks.num_free == sched.blocks.num_blocks
