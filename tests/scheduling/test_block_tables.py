"""Block tables: blocks are allocated as tokens arrive, and shared by the samples of a prompt."""

from tests.support import scheduler_stress as stress
from tests.support.scheduler_steps import request, scheduler, step
from tests.support.shadow import ShadowStore, expected_tokens, finish


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
    assert len(plan.copies) == 2
    sched.commit(plan, store.run(plan))
    assert (sched.blocks.num_used, sched.blocks.pool.num_shared) == (7, 4)


def test_each_sample_equals_single_request_with_its_seed():
    sched = stress.scheduler()
    store = ShadowStore(sched, 97)
    outputs = finish(sched, store, stress.request(0, range(18), max_tokens=12, n=3, seed=5))
    for index in range(3):
        assert outputs[0, index] == expected_tokens(stress.request(9, range(18), max_tokens=12, seed=5 + index), 0, 97)
