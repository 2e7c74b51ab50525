"""The scheduler by itself: prefill and decode by step, prefill budgets, failed steps, and random loads."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.prefill_budget import PrefillBudget
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from tests.support.scheduler_steps import request, scheduler, shape, step


def test_long_prompt_prefills_in_chunks_and_samples_once():
    sched = scheduler()
    sched.add(request(0, prompt=37))
    assert shape(step(sched)[0]) == [(0, 0, 16, False)]
    assert shape(step(sched)[0]) == [(0, 16, 16, False)]
    plan, deltas = step(sched)
    assert shape(plan) == [(0, 32, 5, True)]
    assert [delta.token_ids for delta in deltas] == [(1,)]
    assert shape(step(sched)[0]) == [(0, 37, 1, True)]


def test_failed_step_fails_only_its_requests():
    sched = scheduler(max_num_seqs=1)
    sched.add(request(0, prompt=2))
    sched.add(request(1, prompt=2))
    plan = sched.schedule()
    (delta,) = sched.fail(plan, "the step failed")
    sched.check()
    assert delta.key == 0
    assert str(delta.error) == "INTERNAL: the step failed"
    assert [chunk.sequence.key for chunk in step(sched)[0].chunks] == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 24), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(0, 20))
def test_random_load_answers_every_request_and_frees_every_block(seed, blocks, size, seqs, extra):
    """With random arrivals, aborts and lengths, no step exceeds its budget, and each request gets its tokens once."""
    rnd = random.Random(seed)
    sched = scheduler(blocks, size, seqs, seqs + extra)
    left, open_requests, next_key = 30, {}, 0
    for _ in range(5000):
        while left and rnd.random() < 0.4:
            room = blocks * size
            prompt = rnd.randint(1, room)
            wanted = rnd.randint(1, room - prompt + 1)
            sched.add(request(next_key, prompt, wanted))
            open_requests[next_key] = wanted
            next_key, left = next_key + 1, left - 1
        if open_requests and rnd.random() < 0.05:
            key = rnd.choice(sorted(open_requests))
            assert sched.abort(key)
            del open_requests[key]
        plan = sched.schedule()
        sched.check()
        if plan is None:
            assert not open_requests
            if not left:
                break
            continue
        assert plan.num_tokens <= sched.max_num_batched_tokens
        assert len(plan.chunks) <= sched.max_num_seqs
        for delta in sched.commit(
            plan, StepResult.of_tokens(1 for chunk in plan.chunks for _ in chunk.sampled_sequences)
        ):
            open_requests[delta.key] -= 1
            assert (delta.finish is not None) == (open_requests[delta.key] == 0)
            if delta.finish:
                del open_requests[delta.key]
        sched.check()
    assert not open_requests
    assert not left
    assert sched.blocks.num_used == 0


def prefill_beside_decode(seconds_per_token, *, steps=8, overhead=0.01, prompts=(5000,), budget=512):
    """Return the prompt tokens of each step beside a sequence that decodes, where a token takes so many seconds."""
    now = [0.0]
    sched = Scheduler(
        BlockManager(2048, 16),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        prefill_budget=PrefillBudget(0.1, 0.001, budget),
        clock=lambda: now[0],
    )
    sched.add(request(0, prompt=4, max_tokens=1000))
    step(sched)
    for key, prompt in enumerate(prompts, start=1):
        sched.add(request(key, prompt))
    prefilled = []
    for number in range(steps):
        plan = sched.schedule()
        chunks = shape(plan)
        assert chunks[0][0] == 0, "decode comes first"
        prefilled.append(plan.num_tokens - 1)
        now[0] += overhead + plan.num_tokens * seconds_per_token(number)
        sched.commit(plan, StepResult.of_tokens(1 for chunk in plan.chunks for _ in chunk.sampled_sequences))
        sched.check()
    return prefilled


def test_prefill_chunks_fit_target_step_time():
    prefilled = prefill_beside_decode(lambda number: 0.001)
    assert prefilled[0] == 100  # from the measured time per token
    assert all(80 <= tokens <= 90 for tokens in prefilled[2:])  # from the observed time of a step, which has 10 ms more
    assert prefill_beside_decode(lambda number: 0.0001)[3] > 400
    slower = prefill_beside_decode(lambda number: 0.001 if number < 3 else 0.002)
    assert all(35 <= tokens <= 50 for tokens in slower[-2:])


def test_time_of_a_step_is_that_through_all_stages():
    """Not the time between two commits, which is that of one stage."""
    now = [0.0]
    sched = Scheduler(
        BlockManager(256, 16),
        max_num_seqs=4,
        max_num_batched_tokens=512,
        prefill_budget=PrefillBudget(1.5, 0.01, 512),
        clock=lambda: now[0],
        stages=2,
    )
    for key in (0, 1):
        sched.add(request(key, prompt=3, max_tokens=100))
    step(sched)
    first = sched.schedule()
    sched.add(request(2, prompt=1000))
    second = sched.schedule()
    assert [shape(first), shape(second)] == [[(0, 3, 1, True)], [(1, 3, 1, True), (2, 0, 150, False)]]
    for plan, time in ((first, 0.5), (second, 2.0)):
        now[0] = time
        sched.commit(plan, StepResult.of_tokens([1]))
    assert shape(sched.schedule())[-1] == (2, 150, 112, False)  # 150 tokens took 2 s, 1.5 s are allowed


def test_prefill_always_progresses():
    assert prefill_beside_decode(lambda number: 1.0)[-1] == 32
    assert prefill_beside_decode(lambda number: 1.0, budget=24)[-1] == 23


def test_prefill_without_decode_uses_full_token_budget():
    sched = Scheduler(
        BlockManager(256, 16), max_num_seqs=2, max_num_batched_tokens=512, prefill_budget=PrefillBudget(0.1, 1.0, 512)
    )
    sched.add(request(0, prompt=1000))
    assert shape(step(sched)[0]) == [(0, 0, 512, False)]
