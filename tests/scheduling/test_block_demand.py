"""The blocks that a request needs, and when a cache hit pays off."""

import pytest

from paged_backend.scheduling.block_demand import BlockDemand
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import Costs
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.state_slots import StateSlots
from tests.support.scheduler_stress import request, scheduler
from tests.support.shadow import ShadowStore, finish


def waiting(prompt, **sampling):
    return Group(request(9, prompt, **sampling))


@pytest.mark.parametrize(("prompt", "samples", "blocks"), [(1, 1, 1), (8, 1, 2), (9, 1, 3), (9, 3, 5), (8, 3, 2)])
def test_full_prompt_blocks_are_needed_once_and_others_per_sample(prompt, samples, blocks):
    """In blocks of 4 tokens: with 9 tokens, two blocks are shared by all samples."""
    demand = BlockDemand(BlockManager(16, 4), Costs(), StateSlots())
    group = waiting(range(prompt), n=samples)
    assert demand.demand(group).num_blocks == demand.reserved(group) == blocks


def test_cached_blocks_must_be_available_and_used_blocks_need_not():
    """A cached block is taken from the available ones. A block that another request uses is only shared."""
    sched = scheduler(num_blocks=8)
    store = ShadowStore(sched, 5)
    finish(sched, store, request(0, range(8), max_tokens=1))
    demand = BlockDemand(sched.blocks, Costs(), StateSlots())
    cached = demand.demand(waiting(range(9)))
    assert (len(cached.hit.blocks), cached.num_blocks) == (2, 3)
    sched.add(request(1, range(9)))
    sched.commit(plan := sched.schedule(), store.run(plan))
    used = demand.demand(waiting(range(9)))
    assert (len(used.hit.blocks), used.num_blocks) == (2, 1)


def test_demand_that_exceeds_the_unreserved_blocks_does_not_fit():
    blocks = BlockManager(4, 4)
    demand = BlockDemand(blocks, Costs(), StateSlots())
    needed = demand.demand(waiting(range(9)))
    assert demand.fit(needed, reserved=1) is needed.hit
    assert demand.fit(needed, reserved=2) is None


@pytest.mark.parametrize(("copy", "partial_tokens"), [(1.9, 2), (2.1, 0)])
def test_partial_hit_is_used_if_its_copy_costs_less_than_its_tokens(copy, partial_tokens):
    """Tokens 4 and 5 of a cached block match: at a cost of 1 each, computing them costs 2."""
    sched = scheduler(num_blocks=8)
    finish(sched, ShadowStore(sched, 5), request(0, range(8), max_tokens=1))
    demand = BlockDemand(sched.blocks, Costs(token=1.0, copy=copy), StateSlots())
    hit = demand.fit(demand.demand(waiting([0, 1, 2, 3, 4, 5, 90, 91])), reserved=0)
    assert (len(hit.blocks), hit.partial_tokens) == (1, partial_tokens)


def test_partial_hit_is_not_used_without_a_block_to_lock_its_source():
    sched = scheduler(num_blocks=8)
    finish(sched, ShadowStore(sched, 5), request(0, range(8), max_tokens=1))
    demand = BlockDemand(sched.blocks, Costs(), StateSlots())
    needed = demand.demand(waiting([0, 1, 2, 3, 4, 5, 90, 91]))
    assert needed.num_blocks == 2
    assert demand.fit(needed, reserved=5).partial is not None
    assert demand.fit(needed, reserved=6).partial is None
