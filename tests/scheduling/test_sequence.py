"""Sequences and groups: the seeds of samples, which sequences compute, and what may come from the prefix cache."""

import pytest

from paged_backend.scheduling.sequence import Group
from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import request, scheduler


@pytest.mark.parametrize(("sampling", "waits"), [({}, False), ({"n": 2}, False), ({"n": 2, "beam_width": 2}, True)])
def test_beam_search_needs_previous_result(sampling, waits):
    sched = scheduler()
    sched.add(request(0, prompt=2, **sampling))
    sched.schedule()
    assert sched.needs_results == waits


def test_only_the_leader_computes_until_the_prompt_is_done():
    sched = scheduler()
    sched.add(request(0, prompt=20, n=3))
    sched.schedule()
    (group,) = sched.running
    assert [sequence.index for sequence in group.active] == [0]
    assert group.prefill_len == 20
    sched.schedule()
    assert [sequence.index for sequence in group.active] == [0, 1, 2]
    assert [sequence.pending for sequence in group.active] == [1, 1, 1]


def test_each_sample_has_its_own_seed():
    group = Group(stress.request(0, [1, 2], n=3, seed=5))
    assert [sequence.seed for sequence in group.sequences] == [5, 6, 7]


def test_prompt_tokens_that_are_scored_are_not_taken_from_the_cache():
    """The cache has no logits: the first token without log probabilities after it has to be computed."""
    group = Group(stress.request(0, range(6), prompt_logprobs=0))
    assert (group.unscored(0, 6), group.max_cacheable_tokens) == (range(5), 1)
    group.prompt_logprobs += [()] * 3
    assert (group.unscored(0, 6), group.unscored(4, 5), group.max_cacheable_tokens) == (range(3, 5), range(4, 5), 4)
    group.prompt_logprobs += [()] * 2
    assert (len(group.unscored(0, 6)), group.max_cacheable_tokens) == (0, 6)
    assert Group(stress.request(0, range(6))).max_cacheable_tokens == 6
