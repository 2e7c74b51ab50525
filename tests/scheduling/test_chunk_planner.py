"""The chunk planner: decode before prefill, and how many draft tokens a chunk verifies."""

import pytest

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.prefill_budget import PrefillBudget
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from tests.support.scheduler_steps import request, scheduler, shape, step


def test_decode_before_prefill_within_token_budget():
    sched = scheduler()
    sched.add(request(0, prompt=3, max_tokens=8))
    step(sched)
    sched.add(request(1, prompt=30))
    sched.add(request(2, prompt=3))
    assert shape(step(sched)[0]) == [(0, 3, 1, True), (1, 0, 15, False)]
    assert shape(step(sched)[0]) == [(0, 4, 1, True), (1, 15, 15, True)]
    assert shape(step(sched)[0]) == [(0, 5, 1, True), (1, 30, 1, True), (2, 0, 3, True)]


def test_no_chunk_is_scheduled_after_last_token_in_flight():
    sched = scheduler()
    sched.add(request(0, prompt=2, max_tokens=1))
    sched.add(request(1, prompt=2, max_tokens=2))
    flights = [sched.schedule(), sched.schedule()]
    assert [shape(plan) for plan in flights] == [[(0, 0, 2, True), (1, 0, 2, True)], [(1, 2, 1, True)]]
    sched.commit(flights[0], StepResult.of_tokens([1, 1]))
    assert sched.schedule() is None


def test_stages_share_the_sequences_that_decode():
    """Each step decodes its share, and a sequence waits while another step samples its next token."""
    sched = scheduler(stages=3)
    for key in range(4):
        sched.add(request(key, prompt=2, max_tokens=8))
    step(sched)
    flights = [sched.schedule(), sched.schedule()]
    assert [shape(plan) for plan in flights] == [
        [(0, 2, 1, True), (1, 2, 1, True)],
        [(2, 2, 1, True), (3, 2, 1, True)],
    ]
    assert sched.schedule() is None
    sched.commit(flights[0], StepResult.of_tokens([1, 1]))
    assert shape(sched.schedule()) == [(0, 3, 1, True), (1, 3, 1, True)]


def test_chunks_of_a_prompt_follow_each_other_through_stages():
    sched = scheduler(stages=3)
    sched.add(request(0, prompt=40, max_tokens=8))
    plans = [sched.schedule(), sched.schedule()]
    assert [shape(plan) for plan in plans] == [[(0, 0, 16, False)], [(0, 16, 16, False)]]


@pytest.mark.parametrize(("max_tokens", "draft_tokens"), [(2, 0), (3, 1), (9, 4)])
def test_no_draft_tokens_past_max_tokens(max_tokens, draft_tokens):
    """The last of the remaining tokens is sampled after the draft tokens."""
    blocks = BlockManager(16, 4)
    proposer = lambda sequence, most: [1] * most  # noqa: E731
    sched = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=16, proposer=proposer, max_draft_tokens=4)
    sched.add(request(0, prompt=3, max_tokens=max_tokens))
    step(sched)
    (chunk,) = sched.schedule().chunks
    assert len(chunk.draft_tokens) == draft_tokens


def test_draft_tokens_do_not_use_prefill_budget():
    sched = Scheduler(
        BlockManager(256, 16),
        max_num_seqs=16,
        max_num_batched_tokens=512,
        proposer=lambda sequence, most: [1] * most,
        max_draft_tokens=7,
        prefill_budget=PrefillBudget(0.1, 1.0, 512),
    )
    for key in range(16):
        sched.add(request(key, prompt=4, max_tokens=100))
    step(sched)
    sched.add(request(16, prompt=100))
    assert [len(chunk.draft_tokens) for chunk in sched.schedule().chunks] == [7] * 16
