"""Scheduler statistics."""

from dataclasses import replace

from tests.support.scheduler_steps import request, scheduler, step


def test_stats_describe_last_step():
    """One request decodes beside the prefill of another, is preempted for it, and is recomputed."""
    sched = scheduler(num_blocks=8)
    sched.add(request(0, prompt=4, max_tokens=9, priority=1))
    step(sched)
    sched.add(request(1, prompt=24, max_tokens=2))
    found = []
    while sched.has_work:
        step(sched)
        stats = sched.stats
        found.append((stats.generation_requests, stats.context_requests, stats.context_tokens, stats.paused))
    assert found == [(1, 1, 15, 0), (1, 1, 9, 0), (0, 0, 0, 1), (0, 1, 7, 0)] + 4 * [(1, 0, 0, 0)] + [(0, 0, 0, 0)]
    assert sched.stats.steps == 10


def test_statistics_of_two_engines_are_added():
    one = replace(scheduler(num_blocks=8).stats, running=1, waiting=2, compute_seconds=0.5, remote_up=True)
    other = replace(scheduler(num_blocks=4).stats, running=3, compute_seconds=0.1, steps=7)
    both = one.plus(other)
    assert (both.running, both.waiting, both.steps, both.blocks_total) == (4, 2, 7, 12)
    assert (both.block_size, both.compute_seconds) == (one.block_size, 0.5)
    assert not both.remote_up  # up only if it is for both
