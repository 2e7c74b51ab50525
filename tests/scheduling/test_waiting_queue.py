"""The waiting queue: the order of admission, and the cost of leaving the queue."""

import random
from collections import Counter

import pytest

from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from tests.support.scheduler_steps import request, scheduler, step


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
        read = getattr(Group, name).fget
        monkeypatch.setattr(
            Group, name, property(lambda group, read=read, name=name: asked.update([name]) or read(group))
        )
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
