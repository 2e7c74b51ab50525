"""The scheduler by itself: the chunks of each step, the waiting queue, preemption and its limits."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.request import FinishReason, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import Costs
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.step_result import StepResult

EOS = 7


def request(key, prompt, max_tokens=4, returns_usage=False, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return GenerateRequest(
        key, tuple(range(100, 100 + prompt)), params, 0, frozenset({EOS}), returns_usage=returns_usage
    )


def scheduler(num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=16):
    return Scheduler(
        BlockManager(num_blocks, block_size), max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )


def shape(plan):
    return [(chunk.sequence.key, chunk.start, chunk.length, bool(chunk.sampled_sequences)) for chunk in plan.chunks]


def step(sched, token=1):
    """Run one step in which every sequence samples `token`."""
    plan = sched.schedule()
    sched.check()
    deltas = sched.commit(plan, StepResult.of_tokens(token for chunk in plan.chunks for _ in chunk.sampled_sequences))
    sched.check()
    return plan, deltas


def test_long_prompt_prefills_in_chunks_and_samples_once():
    sched = scheduler()
    sched.add(request(0, prompt=37))
    assert shape(step(sched)[0]) == [(0, 0, 16, False)]
    assert shape(step(sched)[0]) == [(0, 16, 16, False)]
    plan, deltas = step(sched)
    assert shape(plan) == [(0, 32, 5, True)]
    assert [delta.token_ids for delta in deltas] == [(1,)]
    assert shape(step(sched)[0]) == [(0, 37, 1, True)]


def test_blocks_are_allocated_only_as_tokens_arrive():
    sched = scheduler()
    sched.add(request(0, prompt=20, max_tokens=9))
    used = []
    while sched.has_work:
        step(sched)
        used.append(sched.blocks.num_used)
    assert used == [4, 5, 6, 6, 6, 6, 7, 7, 7, 0]


def test_decode_before_prefill_within_token_budget():
    sched = scheduler()
    sched.add(request(0, prompt=3, max_tokens=8))
    step(sched)
    sched.add(request(1, prompt=30))
    sched.add(request(2, prompt=3))
    assert shape(step(sched)[0]) == [(0, 3, 1, True), (1, 0, 15, False)]
    assert shape(step(sched)[0]) == [(0, 4, 1, True), (1, 15, 15, True)]
    assert shape(step(sched)[0]) == [(0, 5, 1, True), (1, 30, 1, True), (2, 0, 3, True)]


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


def test_newest_request_is_preempted_when_pool_is_exhausted():
    sched = scheduler(num_blocks=4, block_size=4)
    sched.add(request(0, prompt=7, max_tokens=9))
    sched.add(request(1, prompt=7, max_tokens=9))
    outputs = {0: [], 1: []}
    token = iter(range(1000, 2000))
    order = []
    while sched.has_work:
        plan = sched.schedule()
        sched.check()
        deltas = sched.commit(
            plan, StepResult.of_tokens(next(token) for chunk in plan.chunks for _ in chunk.sampled_sequences)
        )
        sched.check()
        for delta in deltas:
            outputs[delta.key] += delta.token_ids
            if delta.finish:
                order.append(delta.key)
    assert sched.stats.preemptions == 1
    assert order == [0, 1]
    assert [len(tokens) for tokens in outputs.values()] == [9, 9]
    assert sched.blocks.num_used == 0


def test_lower_priority_number_runs_first_then_arrival_order():
    sched = scheduler(max_num_seqs=1)
    for key, priority in enumerate([0, 5, -1, 0, -1]):
        sched.add(request(key, prompt=2, max_tokens=1, priority=priority))
    order = []
    while sched.has_work:
        order += [chunk.sequence.key for chunk in step(sched)[0].chunks]
    assert order == [2, 4, 0, 3, 1]


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


def test_lowest_priority_is_preempted_when_pool_is_exhausted():
    sched = scheduler(num_blocks=4, block_size=4)
    sched.add(request(0, prompt=7, max_tokens=9, priority=3))
    sched.add(request(1, prompt=7, max_tokens=9, priority=0))
    order = []
    while sched.has_work:
        order += [delta.key for delta in step(sched)[1] if delta.finish]
    assert order == [1, 0]
    assert sched.stats.preemptions == 1


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


def test_stop_token_ends_output_only_after_min_tokens():
    sched = scheduler()
    sched.add(request(0, prompt=2, max_tokens=8))
    _, (delta,) = step(sched, token=EOS)
    assert delta.finish is FinishReason.STOP
    sched.add(request(1, prompt=2, max_tokens=8, min_tokens=2))
    assert step(sched, token=EOS)[1][0].finish is None
    assert step(sched, token=EOS)[1][0].finish is FinishReason.STOP
    assert sched.blocks.num_used == 0


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


@settings(max_examples=300, deadline=None)
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


def test_prefix_cache_is_searched_once_per_step_for_queue_head():
    """Also beside a request of lower priority that could be preempted."""
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


def test_usage_counts_preempted_seconds():
    now = [0.0]
    sched = Scheduler(BlockManager(5, 4), max_num_seqs=2, max_num_batched_tokens=16, clock=lambda: now[0])
    for key in range(2):
        sched.add(request(key, prompt=7, max_tokens=9, returns_usage=True))
    usages = {}
    while sched.has_work:
        now[0] += 1
        deltas = step(sched)[1]
        usages |= {delta.key: (delta.usage.preemptions, delta.usage.preempted_seconds) for delta in deltas}
    assert usages == {0: (0, 0.0), 1: (1, 7.0)}  # from the third step until the tenth


def test_no_chunk_is_scheduled_after_last_token_in_flight():
    sched = scheduler()
    sched.add(request(0, prompt=2, max_tokens=1))
    sched.add(request(1, prompt=2, max_tokens=2))
    flights = [sched.schedule(), sched.schedule()]
    assert [shape(plan) for plan in flights] == [[(0, 0, 2, True), (1, 0, 2, True)], [(1, 2, 1, True)]]
    sched.commit(flights[0], StepResult.of_tokens([1, 1]))
    assert sched.schedule() is None


@pytest.mark.parametrize(("sampling", "waits"), [({}, False), ({"n": 2}, False), ({"n": 2, "beam_width": 2}, True)])
def test_beam_search_needs_previous_result(sampling, waits):
    sched = scheduler()
    sched.add(request(0, prompt=2, **sampling))
    sched.schedule()
    assert sched.needs_results == waits


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


def prefill_beside_decode(seconds_per_token, *, steps=8, overhead=0.01, prompts=(5000,), budget=512):
    """Return the prompt tokens of each step beside a sequence that decodes, where a token takes so many seconds."""
    now = [0.0]
    sched = Scheduler(
        BlockManager(2048, 16),
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        costs=Costs(token=0.001),
        step_seconds=0.1,
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


def test_prefill_always_progresses():
    assert prefill_beside_decode(lambda number: 1.0)[-1] == 32
    assert prefill_beside_decode(lambda number: 1.0, budget=24)[-1] == 23


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
        costs=Costs(token=1.0),
        proposer=lambda sequence, most: [1] * most,
        max_draft_tokens=7,
        step_seconds=0.1,
    )
    for key in range(16):
        sched.add(request(key, prompt=4, max_tokens=100))
    step(sched)
    sched.add(request(16, prompt=100))
    assert [len(chunk.draft_tokens) for chunk in sched.schedule().chunks] == [7] * 16


def test_prefill_without_decode_uses_full_token_budget():
    sched = Scheduler(
        BlockManager(256, 16), max_num_seqs=2, max_num_batched_tokens=512, costs=Costs(token=1.0), step_seconds=0.1
    )
    sched.add(request(0, prompt=1000))
    assert shape(step(sched)[0]) == [(0, 0, 512, False)]
