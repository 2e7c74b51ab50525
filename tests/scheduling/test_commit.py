"""Commits of steps, ends and aborts: where outputs end, what is returned and counted, and what becomes of blocks."""

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import FinishReason
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import StepResult, accept_draft_tokens
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
    assert sched.blocks.pool.indexes[0].blocks >= set(
        sched.running[0].leader.tables[0][:2]
    )  # the full blocks of the prompt
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
    assert first.prompt_values == expected_scores(one, 8)
    assert (token.sample, token.prompt_values) == (1, None)


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
    assert prompt.prompt_values == expected_scores(one, 8)
    assert [(delta.sample, delta.prompt_values) for delta in tokens] == [(1, None)] * 2


def test_fingerprints_end_with_the_output():
    """A stop token among the accepted draft tokens ends it."""
    sched = stress.scheduler(draft_tokens=4)
    one = stress.request(0, [5, 6, 7] * 3, max_tokens=12, stop_ids={7}, logits_digest=True)
    sched.add(one)
    for tokens in ([5], [6, 7, 5, 6, 7]):
        plan = sched.schedule()
        prints = [bytes([token]) * 16 for token in tokens]
        (delta,) = sched.commit(plan, StepResult([tokens], values={"fingerprints": {0: prints}}))
    assert delta.token_ids == (6, 7)
    assert delta.values == {"fingerprints": [bytes([6]) * 16, bytes([7]) * 16]}


@pytest.mark.parametrize(
    ("sampled", "draft_tokens", "expected"),
    [([1, 2, 3], [1, 2], [1, 2, 3]), ([1, 9, 3], [1, 2], [1, 9]), ([9, 2, 3], [1, 2], [9])],
)
def test_tokens_after_rejected_draft_are_dropped(sampled, draft_tokens, expected):
    assert accept_draft_tokens(sampled, draft_tokens) == expected


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_abort_frees_blocks_immediately(when):
    sched = scheduler()
    sched.add(request(0, prompt=20, max_tokens=9))
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3}[when]):
        step(sched)
    assert sched.abort(0)
    sched.check()
    assert sched.blocks.num_used == 0
    assert not sched.has_work
    assert not sched.abort(0)
    assert not sched.abort(99)
    assert sched.schedule() is None


@pytest.mark.parametrize(("code", "hits"), [(ErrorCode.INTERNAL, 0), (ErrorCode.INVALID_ARGUMENT, 3)])
def test_blocks_of_a_request_are_not_cached_after_an_internal_error(code, hits):
    """Their keys and values may be wrong."""
    sched = scheduler(caching=True)
    sched.add(request(0, prompt=13))
    (delta,) = sched.commit(sched.schedule(), StepResult([[1]], errors={0: RequestError(code, "no token")}))
    sched.check()
    assert (delta.error.code, sched.blocks.num_used, sched.has_work) == (code, 0, False)
    assert sched.blocks.match(Group(request(1, prompt=13)).leader, 13).num_blocks == hits


# --- beam search: the tokens that all outputs have in common are returned first ---------------------------------------


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
    tables = [sequence.tables[0] for sequence in sched.running[0].sequences]
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
