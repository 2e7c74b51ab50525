"""Commits of beam searches: the tokens that all outputs have in common are returned first, the rest at the end."""

from paged_backend.api.request import FinishReason
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.step_result import StepResult
from tests.support.scheduler_steps import request, scheduler

SEARCH = {"n": 2, "beam_width": 2, "max_tokens": 3}


def beam_step(sched, *rows):
    """Run one step whose live beams have these candidates, {token: log probability}."""
    plan = sched.schedule()
    candidates = {
        beam: [Candidate(token, value) for token, value in sorted(row.items(), key=lambda one: -one[1])]
        for beam, row in enumerate(rows)
    }
    deltas = sched.commit(plan, StepResult([[0] for _ in rows], candidates=candidates))
    sched.check()
    return [(delta.sample, delta.token_ids, delta.finish) for delta in deltas]


def after_two_steps():
    """Return a search whose beams have the outputs 5 17 and 5 18, and what its second step returned."""
    sched = scheduler(block_size=2)
    sched.add(request(0, prompt=2, **SEARCH))
    assert beam_step(sched, {5: -0.1, 6: -2.0}) == []  # the beams begin differently
    return sched, beam_step(sched, {17: -0.1, 18: -0.2}, {17: -9.0, 18: -9.0})


def test_common_tokens_are_returned_once_for_each_output():
    sched, deltas = after_two_steps()
    assert deltas == [(0, (5,), None), (1, (5,), None)]
    length = FinishReason.LENGTH
    assert beam_step(sched, {1: -0.1, 2: -9.0}, {3: -0.1, 4: -9.0}) == [(0, (17, 1), length), (1, (18, 3), length)]
    assert not sched.has_work
    assert sched.blocks.num_used == 0


def test_beams_share_the_blocks_of_their_common_tokens():
    """The beam without a continuation is dropped, and the other one forks."""
    sched, _ = after_two_steps()
    tables = [sequence.blocks for sequence in sched.running[0].sequences]
    assert [sequence.output for sequence in sched.running[0].sequences] == [[5, 17], [5, 18]]
    assert tables[0] == tables[1]
    assert sched.blocks.num_used == len(tables[0]) == 2


def test_output_that_was_ended_gets_no_more_tokens():
    sched = scheduler(block_size=2)
    sched.add(request(0, prompt=2, **SEARCH))
    beam_step(sched, {5: -0.1, 6: -2.0})
    assert sched.end(0, 1)
    assert beam_step(sched, {17: -0.1, 18: -0.2}, {17: -9.0, 18: -9.0}) == [(0, (5,), None)]
    assert [sample for sample, _, _ in beam_step(sched, {1: -0.1}, {3: -0.1})] == [0]


def test_expired_search_returns_its_live_beams():
    sched, _ = after_two_steps()
    deltas = sched.expire(0)
    timeout = FinishReason.TIMEOUT
    assert [(one.sample, one.token_ids, one.finish) for one in deltas] == [(0, (17,), timeout), (1, (18,), timeout)]
    assert sched.blocks.num_used == 0
    sched.check()
