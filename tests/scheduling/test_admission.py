"""Admission: which waiting request joins the batch, when, and whom it may displace."""

import random
from collections import Counter

import pytest

from paged_backend.api.request import FinishReason
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Costs
from paged_backend.scheduling.scheduler import Scheduler
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


@pytest.mark.parametrize(("copy", "cached_tokens"), [(1.9, 6), (2.1, 4)])
def test_partial_hit_is_used_if_its_copy_costs_less_than_its_tokens(copy, cached_tokens):
    """Tokens 4 and 5 of a cached block match: at a cost of 1 each, computing them costs 2."""
    sched = stress.scheduler(num_blocks=8, costs=Costs(token=1.0, copy=copy))
    store = ShadowStore(sched, 97)
    finish(sched, store, stress.request(0, range(8), max_tokens=1))
    finish(sched, store, stress.request(1, [0, 1, 2, 3, 4, 5, 90, 91], max_tokens=1))
    assert sched.stats.cached_tokens == cached_tokens


@pytest.mark.parametrize(("held", "cached_tokens"), [(5, 6), (6, 4)])
def test_partial_hit_is_not_used_without_a_page_to_lock_its_source(held, cached_tokens):
    """The request needs a block, a cached one for its hit, and the source of its partial hit."""
    sched = stress.scheduler(num_blocks=8)
    store = ShadowStore(sched, 97)
    finish(sched, store, stress.request(0, range(8), max_tokens=1))
    assert sched.blocks.pool.allocate(held)
    sched.add(stress.request(1, [0, 1, 2, 3, 4, 5, 90, 91], max_tokens=1))
    plan = sched.schedule()
    assert sched.stats.cached_tokens == cached_tokens
    sched.commit(plan, store.run(plan))


@pytest.mark.parametrize(("prompt", "running"), [(12, [0, 1]), (13, [0])])
def test_pages_that_running_samples_will_need_are_not_given_away(prompt, running):
    """The samples share three of eight pages. Two more are kept for the copies of the last one."""
    sched = scheduler(num_blocks=8, max_num_batched_tokens=32)
    sched.add(request(0, prompt=9, n=3))
    sched.add(request(1, prompt=prompt))
    step(sched)
    assert [group.key for group in sched.running] == running


# --- the waiting queue ------------------------------------------------------------------------------------------------


def test_lower_priority_number_runs_first_then_arrival_order():
    sched = scheduler(max_num_seqs=1)
    for key, priority in enumerate([0, 5, -1, 0, -1]):
        sched.add(request(key, prompt=2, max_tokens=1, priority=priority))
    order = []
    while sched.has_work:
        order += [chunk.sequence.key for chunk in step(sched)[0].chunks]
    assert order == [2, 4, 0, 3, 1]


@pytest.mark.parametrize("leave", [Scheduler.abort, Scheduler.end_all])
def test_removing_from_long_queue_does_not_scan_it(leave, monkeypatch):
    """Each of 4,096 requests is found by a few comparisons, and the others keep their order."""
    sched, asked = scheduler(), Counter()
    for name in ("key", "scheduling_order"):
        found = getattr(Group, name)
        counted = property(
            lambda group, found=found, name=name: asked.update([name]) or found.__get__(group), found.__set__
        )
        monkeypatch.setattr(Group, name, counted)
    keys = list(range(4096))
    for key in keys:
        sched.add(request(key, prompt=2, priority=key % 3))
    leaving = random.Random(1).sample(keys, 4000)
    asked.clear()
    for key in leaving:
        assert sched.has_request(key)
        assert leave(sched, key)
        assert not sched.has_request(key) and not leave(sched, key)
    assert asked.total() < 40 * len(leaving)
    sched.check()
    entered = []
    while sched.has_work:
        plan, _ = step(sched)
        entered += plan.admitted
    assert entered == sorted(set(keys) - set(leaving), key=lambda key: (key % 3, key))
