"""Engine outputs: pool maps."""

from paged_backend.api.block_layout import FULL, BlockLayout, StateKind
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.outputs import PoolMap
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.plan import StepResult
from paged_backend.scheduling.scheduler import Scheduler


def test_pool_map_has_the_pages_of_states():
    """One sequence runs, and the state at the end of its first block was kept; another checkpoint is a session's."""
    blocks = BlockManager(16, BlockLayout(4, (FULL, StateKind(2))), caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=2, max_num_batched_tokens=16, session_pages=16)
    for key, session in enumerate(("chat", None)):
        tokens = range(10 * key, 10 * key + 6)
        scheduler.add(
            GenerateRequest(key, tuple(tokens), SamplingParams(max_tokens=2), 0, frozenset(), session=session)
        )
        for _ in range(3 - key):
            plan = scheduler.schedule()
            scheduler.commit(plan, StepResult.of_tokens([50] * sum(len(one.sampled_sequences) for one in plan.chunks)))
    pool = PoolMap.of(scheduler, scheduler.stats)
    assert sorted(pool.states) == sorted("." * 7 + "11" + "11" + "cc" + "ppp")
    assert (pool.stats.states_used, pool.stats.states_cached, pool.state_blocks) == (2, 1, 2)


def test_pool_map_of_running_scheduler():
    """Two samples of a prompt of two and a half blocks: a block that both hold counts once."""
    scheduler = Scheduler(BlockManager(8, BlockLayout(4), caching=True), max_num_seqs=2, max_num_batched_tokens=16)
    scheduler.add(GenerateRequest(0, tuple(range(10)), SamplingParams(n=2), 0, frozenset()))
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult.of_tokens([50, 60]))
    pool = PoolMap.of(scheduler, scheduler.stats)
    assert sorted(pool.states) == [*".....222"]
    assert (pool.tokens, pool.stats.running) == (10, 1)
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult.of_tokens([51, 61]))
    pool = PoolMap.of(scheduler, scheduler.stats)
    assert sorted(pool.states) == [*"....1122"]
    assert pool.tokens == 8 + 3 + 3
    scheduler.abort(0)
    pool = PoolMap.of(scheduler, scheduler.stats)
    assert sorted(pool.states) == [*"....cccc"]  # the last blocks of both samples too
    assert (pool.tokens, pool.stats.running) == (0, 0)
