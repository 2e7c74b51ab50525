"""Preemption: which request loses its blocks, and how they are kept or computed again."""

import pytest

from paged_backend.scheduling.plan import Costs
from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import request, sampled, scheduler, step
from tests.support.shadow import ShadowStore, expected_tokens, finish


def test_newest_request_is_preempted_when_pool_is_exhausted():
    sched = scheduler(num_blocks=4, block_size=4)
    sched.add(request(0, prompt=7, max_tokens=9))
    sched.add(request(1, prompt=7, max_tokens=9))
    outputs = {0: [], 1: []}
    token = iter(range(1000, 2000))
    order = []
    while sched.has_work:
        plan = sched.schedule()
        sched.check()
        deltas = sched.commit(plan, sampled(plan, next(token)))
        sched.check()
        for delta in deltas:
            outputs[delta.key] += delta.token_ids
            if delta.finish:
                order.append(delta.key)
    assert sched.stats.preemptions == 1
    assert order == [0, 1]
    assert [len(tokens) for tokens in outputs.values()] == [9, 9]
    assert sched.blocks.num_used == 0


def test_lowest_priority_is_preempted_when_pool_is_exhausted():
    sched = scheduler(num_blocks=4, block_size=4)
    sched.add(request(0, prompt=7, max_tokens=9, priority=3))
    sched.add(request(1, prompt=7, max_tokens=9, priority=0))
    order = []
    while sched.has_work:
        order += [delta.key for delta in step(sched)[1] if delta.finish]
    assert order == [1, 0]
    assert sched.stats.preemptions == 1


def test_usage_counts_preempted_seconds():
    now = [0.0]
    sched = scheduler(5, max_num_seqs=2, clock=lambda: now[0])
    for key in range(2):
        sched.add(request(key, prompt=7, max_tokens=9, returns_usage=True))
    usages = {}
    while sched.has_work:
        now[0] += 1
        deltas = step(sched)[1]
        usages |= {delta.key: (delta.usage.preemptions, delta.usage.preempted_seconds) for delta in deltas}
    assert usages == {0: (0, 0.0), 1: (1, 7.0)}  # from the third step until the tenth


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_group_resumes_with_shared_blocks(caching):
    """Without sharing after the preemption, three samples of this prompt would not fit the pool."""
    sched = stress.scheduler(num_blocks=10, caching=caching)
    store = ShadowStore(sched, 97)
    old, new = stress.request(0, range(50, 58), max_tokens=24), stress.request(1, range(18), max_tokens=7, n=3)
    outputs = finish(sched, store, old, new)
    assert sched.stats.preemptions > 0
    for one in (old, new):
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
    sched = stress.scheduler(num_blocks=14, caching=False, **options)
    finish(sched, ShadowStore(sched, 97), *stress.rivals())
    assert {kind: sched.stats.preemptions} == {
        name: count for name in ("swapped", "recomputed") if (count := getattr(sched.stats, name))
    }
