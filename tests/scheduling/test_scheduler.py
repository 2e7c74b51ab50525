"""The scheduler by itself: the chunks, blocks and budgets of steps, failed steps, and random loads."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.api.block_layout import BlockLayout
from paged_backend.kv.blocks import NO_BLOCKS, BlockManager
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.budgets import PrefillBudget
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import PlanBuilder, StepResult
from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import request, sampled, scheduler, shape, step
from tests.support.shadow import ShadowStore, expected_tokens, finish


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
    sched = scheduler(blocks, size, max_num_seqs=seqs, max_num_batched_tokens=seqs + extra)
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
        for delta in sched.commit(plan, sampled(plan)):
            open_requests[delta.key] -= 1
            assert (delta.finish is not None) == (open_requests[delta.key] == 0)
            if delta.finish:
                del open_requests[delta.key]
        sched.check()
    assert not open_requests
    assert not left
    assert sched.blocks.num_used == 0


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


# --- the samples of a request -----------------------------------------------------------------------------------------


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


def test_blocks_are_allocated_only_as_tokens_arrive():
    sched = scheduler()
    sched.add(request(0, prompt=20, max_tokens=9))
    used = []
    while sched.has_work:
        step(sched)
        used.append(sched.blocks.num_used)
    assert used == [4, 5, 6, 6, 6, 6, 7, 7, 7, 0]


def test_samples_share_prompt_blocks_until_they_diverge():
    """18 tokens in blocks of 4: all samples share four full blocks, and two of three copy the partial one."""
    sched = stress.scheduler()
    store = ShadowStore(sched, 97)
    one = stress.request(0, range(18), max_tokens=4, n=3, seed=5)
    sched.add(one)
    plan = sched.schedule()
    assert len(plan.chunks) == 1
    assert len(plan.chunks[0].sampled_sequences) == 3
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.pool.num_shared) == (5, 5)
    plan = sched.schedule()
    assert len(plan.transfers.copies) == 2
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.pool.num_shared) == (7, 4)


def test_each_sample_equals_single_request_with_its_seed():
    sched = stress.scheduler()
    store = ShadowStore(sched, 97)
    outputs = finish(sched, store, stress.request(0, range(18), max_tokens=12, n=3, seed=5))
    for index in range(3):
        assert outputs[0, index] == expected_tokens(stress.request(9, range(18), max_tokens=12, seed=5 + index), 0, 97)


def builder(budget=16, **options):
    return PlanBuilder(budget, 0.0, in_flight=False, **options)


def add(plan, group, length):
    plan.add_chunk(group, group.leader, length, NO_BLOCKS)
    return plan.chunks[-1]


@pytest.mark.parametrize(("length", "samples", "forks"), [(5, 0, 0), (6, 3, 2)])
def test_all_samples_fork_and_sample_at_the_end_of_the_prompt(length, samples, forks):
    group = Group(stress.request(0, range(6), n=3))
    chunk = add(builder(), group, length)
    assert (len(chunk.sampled_sequences), len(chunk.forks)) == (samples, forks)


def test_request_without_output_samples_nothing():
    chunk = add(builder(), Group(stress.request(0, range(6), max_tokens=0, prompt_logprobs=0)), 6)
    assert (chunk.sampled_sequences, chunk.ends_request) == ((), True)
    assert chunk.scored == range(5)  # the last prompt token has no next one


def test_chunk_ends_where_the_limit_of_scored_positions_is_reached():
    plan = builder(max_scored=4)
    one, other = (Group(stress.request(key, range(6), prompt_logprobs=0)) for key in range(2))
    assert plan.limit_scored(one, 0, 6) == 4
    assert plan.limit_scored(Group(stress.request(2, range(6))), 0, 6) == 6
    add(plan, one, 3)
    assert plan.limit_scored(other, 0, 6) == 1


def test_removed_request_returns_its_budget():
    plan = builder(budget=16, max_scored=8)
    kept, removed = (Group(stress.request(key, range(6), prompt_logprobs=0)) for key in range(2))
    for group in (kept, removed):
        add(plan, group, 4)
    assert (plan.budget, plan.scored_budget) == (8, 0)
    plan.remove(removed)
    assert (plan.budget, plan.scored_budget) == (12, 4)
    built = plan.build(BlockManager(4, BlockLayout(4)), AdapterSlots(0))
    assert [chunk.sequence.key for chunk in built.chunks] == [0]
    assert built.num_tokens == 4


# --- prefill beside decode, and draft tokens --------------------------------------------------------------------------


def prefill_beside_decode(seconds_per_token, *, steps=8, overhead=0.01, prompts=(5000,), budget=512):
    """Return the prompt tokens of each step beside a sequence that decodes, where a token takes so many seconds."""
    now = [0.0]
    sched = scheduler(
        2048,
        16,
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
        sched.commit(plan, sampled(plan))
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
    sched = scheduler(
        256,
        16,
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
    sched = scheduler(256, 16, max_num_seqs=2, max_num_batched_tokens=512, prefill_budget=PrefillBudget(0.1, 1.0, 512))
    sched.add(request(0, prompt=1000))
    assert shape(step(sched)[0]) == [(0, 0, 512, False)]


@pytest.mark.parametrize(("max_tokens", "draft_tokens"), [(2, 0), (3, 1), (9, 4)])
def test_no_draft_tokens_past_max_tokens(max_tokens, draft_tokens):
    """The last of the remaining tokens is sampled after the draft tokens."""
    sched = scheduler(proposer=lambda sequence, most: [1] * most, max_draft_tokens=4)
    sched.add(request(0, prompt=3, max_tokens=max_tokens))
    step(sched)
    (chunk,) = sched.schedule().chunks
    assert len(chunk.draft_tokens) == draft_tokens


def test_draft_tokens_do_not_use_prefill_budget():
    sched = scheduler(
        256,
        16,
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


# --- statistics -------------------------------------------------------------------------------------------------------


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
    one = scheduler(num_blocks=8).stats.having(running=1, waiting=2, compute_seconds=0.5, remote_up=True)
    other = scheduler(num_blocks=4).stats.having(running=3, compute_seconds=0.1, steps=7, remote_up=False)
    both = one.plus(other)
    assert (both.running, both.waiting, both.steps, both.blocks_total) == (4, 2, 7, 12)
    assert (both.block_size, both.compute_seconds) == (one.block_size, 0.5)
    assert not both.remote_up  # up only if it is for both


# --- imports --------------------------------------------------------------------------------------------------------

KV = ("blocks", "content", "ledger", "pages", "pins", "scores", "sequence", "states")
CORE = ("api/*.py", "scheduling/*.py", "text/detokenizer.py", *(f"kv/{module}.py" for module in KV))


@pytest.mark.parametrize("pattern", CORE)
def test_scheduling_core_does_not_import_torch(pattern):
    """The scheduling core is tested with millions of steps, without torch."""
    for module in sorted((Path(__file__).parents[2] / "paged_backend").glob(pattern)):
        imports = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(module.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
        }
        assert imports <= set(sys.stdlib_module_names) | {"paged_backend", "numpy"}, module


def test_scheduler_loads_without_torch():
    code = "import paged_backend.scheduling.scheduler, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
