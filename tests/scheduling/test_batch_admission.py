"""Batch admission: when a waiting request joins the batch, and whom it may displace."""

import pytest

from paged_backend.api.request import FinishReason
from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import request, scheduler, step
from tests.support.shadow import ShadowStore, finish


def test_requests_join_and_leave_between_steps():
    sched = scheduler(max_num_seqs=2)
    for key in range(3):
        sched.add(request(key, prompt=2, max_tokens=1 + key))
    plan, deltas = step(sched)
    assert [chunk.sequence.key for chunk in plan.chunks] == [0, 1]
    assert [delta.finish for delta in deltas] == [FinishReason.LENGTH, None]
    plan, _ = step(sched)
    assert [chunk.sequence.key for chunk in plan.chunks] == [1, 2]


def test_first_come_first_served_even_if_a_later_request_would_fit():
    sched = scheduler(num_blocks=8)
    sched.add(request(0, prompt=16, max_tokens=2))
    step(sched)
    sched.add(request(1, prompt=24))
    sched.add(request(2, prompt=2))
    plan, _ = step(sched)
    assert [chunk.sequence.key for chunk in plan.chunks] == [0]
    assert sched.stats.waiting == 2
    plan, _ = step(sched)
    assert [chunk.sequence.key for chunk in plan.chunks] == [1]


@pytest.mark.parametrize("short_of", ["blocks", "seqs"])
def test_higher_priority_preempts_newest_of_lowest_priority_only(short_of):
    sched = scheduler(**{"blocks": {"num_blocks": 8}, "seqs": {"max_num_seqs": 2}}[short_of])
    for key, priority in enumerate([5, 5]):
        sched.add(request(key, prompt=13, max_tokens=9, priority=priority))
        step(sched)
    sched.add(request(2, prompt=6, max_tokens=2, priority=5))
    assert {chunk.sequence.key for chunk in step(sched)[0].chunks} == {0, 1}
    sched.add(request(3, prompt=6, max_tokens=2, priority=1))
    assert {chunk.sequence.key for chunk in step(sched)[0].chunks} == {0, 3}
    assert sched.stats.preemptions == 1


def test_prefix_cache_is_searched_once_per_step_for_queue_head():
    """A request of lower priority that could be preempted causes no second search."""
    sched = scheduler(num_blocks=8)
    sched.add(request(0, prompt=8, max_tokens=20))
    sched.add(request(1, prompt=8, max_tokens=20, priority=1))
    step(sched)
    sched.add(request(2, prompt=28))
    searches, match = [], sched.blocks.match
    sched.blocks.match = lambda *args: searches.append(args) or match(*args)
    for count in range(1, 4):
        assert len(step(sched)[0].chunks) == 2
        assert len(searches) == count


def test_no_preemption_if_request_still_would_not_fit():
    """A higher priority holds 8 of 12 blocks and a lower one 2; the waiting request needs 6."""
    sched = stress.scheduler(num_blocks=12, max_num_batched_tokens=64)
    store = ShadowStore(sched, 97)
    above = stress.request(0, range(100, 131), max_tokens=2, priority=-5)
    below = stress.request(1, range(200, 207), max_tokens=2, priority=5)
    for one in (above, below):
        sched.add(one)
    plan = sched.schedule()
    sched.commit(plan, store.run(plan))
    assert sched.blocks.num_used == 10
    sched.add(stress.request(2, range(300, 323), max_tokens=1, priority=0))
    plan = sched.schedule()
    assert sched.stats.preemptions == 0
    sched.commit(plan, store.run(plan))
    assert finish(sched, store)
    assert sched.stats.preemptions == 0


def test_resumed_request_does_not_count_cache_hits():
    sched = stress.scheduler(num_blocks=14)
    finish(sched, ShadowStore(sched, 97), *stress.rivals())
    assert sched.stats.preemptions > 0
    assert sched.stats.cached_tokens == 0
