"""Commits of steps: where outputs end, and what counts towards the usage."""

import pytest

from paged_backend.api.request import FinishReason
from paged_backend.scheduling.step_result import StepResult
from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import EOS, request, scheduler, step
from tests.support.shadow import ShadowStore, expected_scores, expected_tokens, finish


def test_stop_token_ends_output_only_after_min_tokens():
    sched = scheduler()
    sched.add(request(0, prompt=2, max_tokens=8))
    _, (delta,) = step(sched, token=EOS)
    assert delta.finish is FinishReason.STOP
    sched.add(request(1, prompt=2, max_tokens=8, min_tokens=2))
    assert step(sched, token=EOS)[1][0].finish is None
    assert step(sched, token=EOS)[1][0].finish is FinishReason.STOP
    assert sched.blocks.num_used == 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", range(1, 9))
@pytest.mark.parametrize("last", range(1, 5))
def test_usage_excludes_chunks_of_finished_sequences(prompt, last, n):
    """A row whose result is dropped may allocate or copy a block."""

    def usages(ahead):
        sched = scheduler()
        sched.add(request(0, prompt, max_tokens=99, returns_usage=True, n=n))
        found, flights, drawn = [], [], 0
        while sched.has_work or flights:
            plan = sched.schedule()
            flights += [plan] if plan else []
            while len(flights) > (ahead and plan is not None):
                done, drawn = flights.pop(0), drawn + 1
                sequences = [one for chunk in done.chunks for one in chunk.sampled_sequences]
                tokens = [EOS if drawn >= last + one.index else 1 for one in sequences]
                found += [delta.usage for delta in sched.commit(done, StepResult.of_tokens(tokens))]
        sched.check()
        return found

    assert usages(ahead=True) == usages(ahead=False)


def test_sample_ending_during_shared_prefill():
    """The leader ends with the step in flight: the other samples go on, and the cached blocks are right."""
    sched = stress.scheduler()
    store = ShadowStore(sched, 97)
    one = stress.request(0, range(100, 109), max_tokens=6, n=3)
    sched.add(one)
    plan = sched.schedule()
    result = store.run(plan)
    assert sched.end(0, 0)
    deltas = sched.commit(plan, result)
    sched.check()
    assert [delta.sample for delta in deltas] == [1, 2]
    assert sched.blocks.pool.index.blocks >= set(sched.running[0].leader.blocks[:2])  # the full blocks of the prompt
    outputs = finish(sched, store)
    assert {key: [*deltas[key[1] - 1].token_ids, *rest] for key, rest in outputs.items()} == {
        (0, index): expected_tokens(one, index, 97) for index in (1, 2)
    }
    assert finish(sched, store, stress.request(1, range(100, 109)))[1, 0] == expected_tokens(
        stress.request(1, range(100, 109)), 0, 97
    )
    assert sched.stats.cached_tokens == 8


def test_prompt_is_returned_although_its_first_sample_ends_before_the_commit():
    """The other samples continue."""
    sched = stress.scheduler()
    one = stress.request(0, range(6), max_tokens=2, n=2, prompt_logprobs=0, logits_digest=True)
    store = ShadowStore(sched, 8)
    sched.add(one)
    plan = sched.schedule()
    result = store.run(plan)
    assert sched.end(0, 0)
    first, token = sched.commit(plan, result)
    assert (first.prompt_logprobs, first.prompt_fingerprints) == expected_scores(one, 8)
    assert (token.sample, token.prompt_logprobs) == (1, None)


@pytest.mark.parametrize("planned", [1, 2])
def test_prompt_is_returned_once_although_its_first_sample_ends_with_chunks_in_flight(planned):
    """In a pipeline. The second sample computes the prompt again, unless both chunks were planned."""
    sched = stress.scheduler(max_num_seqs=2, max_num_batched_tokens=4, stages=3)
    one = stress.request(0, range(8), max_tokens=2, n=2, prompt_logprobs=1, logits_digest=True)
    store = ShadowStore(sched, 8)
    sched.add(one)
    flights = []
    for _ in range(planned):
        plan = sched.schedule()
        flights.append((plan, store.run(plan)))
    assert sched.end(0, 0)
    deltas = []
    while sched.has_work or flights:
        if plan := sched.schedule():
            flights.append((plan, store.run(plan)))
        deltas += sched.commit(*flights.pop(0))
        sched.check()
    prompt, *tokens = deltas
    assert (prompt.prompt_logprobs, prompt.prompt_fingerprints) == expected_scores(one, 8)
    assert [(delta.sample, delta.prompt_logprobs) for delta in tokens] == [(1, None)] * 2


def test_fingerprints_end_with_the_output():
    """A stop token among the accepted draft tokens ends it."""
    sched = stress.scheduler(draft_tokens=4)
    one = stress.request(0, [5, 6, 7] * 3, max_tokens=12, stop_ids={7}, logits_digest=True)
    sched.add(one)
    for tokens in ([5], [6, 7, 5, 6, 7]):
        plan = sched.schedule()
        prints = [bytes([token]) * 16 for token in tokens]
        (delta,) = sched.commit(plan, StepResult([tokens], fingerprints={0: prints}))
    assert delta.token_ids == (6, 7)
    assert delta.fingerprints == (bytes([6]) * 16, bytes([7]) * 16)
