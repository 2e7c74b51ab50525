"""The plan builder: the budgets of a step, and what a chunk samples."""

import pytest

from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.block_manager import BlockManager, Copy
from paged_backend.scheduling.host_offload import BlockTransfer
from paged_backend.scheduling.plan import NO_BLOCKS
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateSlots
from tests.support.scheduler_stress import request


def builder(budget=16, **options):
    return PlanBuilder(budget, 0.0, in_flight=False, **options)


def add(plan, group, length):
    plan.add_chunk(group, group.leader, length, NO_BLOCKS)
    return plan.chunks[-1]


def build(plan):
    return plan.build(BlockManager(4, 4), AdapterSlots(0), StateSlots())


@pytest.mark.parametrize(("length", "sampled", "forks"), [(5, 0, 0), (6, 3, 2)])
def test_all_samples_fork_and_sample_at_the_end_of_the_prompt(length, sampled, forks):
    group = Group(request(0, range(6), n=3))
    chunk = add(builder(), group, length)
    assert (len(chunk.sampled_sequences), len(chunk.forks)) == (sampled, forks)


def test_request_without_output_samples_nothing():
    chunk = add(builder(), Group(request(0, range(6), max_tokens=0, prompt_logprobs=0)), 6)
    assert (chunk.sampled_sequences, chunk.ends_request) == ((), True)
    assert chunk.scored == range(5)  # the last prompt token has no next one


def test_chunk_ends_where_the_limit_of_scored_positions_is_reached():
    plan = builder(max_scored=4)
    one, other = (Group(request(key, range(6), prompt_logprobs=0)) for key in range(2))
    assert plan.limit_scored(one, 0, 6) == 4
    assert plan.limit_scored(Group(request(2, range(6))), 0, 6) == 6
    add(plan, one, 3)
    assert plan.limit_scored(other, 0, 6) == 1


def test_removed_request_returns_its_budget_copies_and_moves():
    plan = builder(budget=16, max_scored=8)
    kept, removed = (Group(request(key, range(6), prompt_logprobs=0)) for key in range(2))
    for group in (kept, removed):
        add(plan, group, 4)
        plan.add_copies(group.key, [Copy(group.key, 9)])
        plan.add_moves_in(group.key, [BlockTransfer(group.key, 8, None)])
    assert (plan.budget, plan.scored_budget) == (8, 0)
    assert plan.remove(removed) == ([Copy(1, 9)], [BlockTransfer(1, 8, None)])
    assert (plan.budget, plan.scored_budget) == (12, 4)
    built = build(plan)
    assert [chunk.sequence.key for chunk in built.chunks] == [0]
    assert (built.copies, built.moves_in) == ((Copy(0, 9),), (BlockTransfer(0, 8, None),))
    assert built.num_tokens == 4


def test_plan_without_chunks_is_none():
    assert build(builder()) is None
