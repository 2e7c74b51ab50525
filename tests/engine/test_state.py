"""The state of the engine: which requests it has, and what its statistics count."""

from types import SimpleNamespace

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.outputs import PoolMap
from paged_backend.engine.state import EngineState
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.scheduler import Scheduler


def state_of(outputs, **parts):
    scheduler = Scheduler(BlockManager(8, BlockLayout(4)), max_num_seqs=2, max_num_batched_tokens=16)
    return EngineState(scheduler, outputs.append, **parts)


def test_announced_requests_count_as_waiting():
    state = state_of([])
    state.scheduler.add(GenerateRequest(1, (1, 2), SamplingParams(), 0, frozenset()))
    state.announced |= {2, 3}
    assert state.stats().waiting == 3
    assert [key for key in range(5) if state.has_request(key)] == [1, 2, 3]


def test_step_is_emitted_with_its_plan():
    state = state_of(outputs := [])
    state.scheduler.add(GenerateRequest(1, (1, 2), SamplingParams(), 0, frozenset()))
    plan = state.scheduler.schedule()
    state.emit_step((), plan)
    state.emit_step()
    assert [one.entered for one in outputs] == [(1,), ()]
    assert (outputs[0].started_at, outputs[0].stats.running) == (plan.planned_at, 1)


def test_statistics_of_the_disk_tier_are_added():
    state = state_of([], prefix_tiers=SimpleNamespace(add_stats=lambda stats: ("disk", stats.blocks_total)))
    assert state.stats() == ("disk", 8)


def test_requested_pool_map_is_emitted_once():
    state = state_of(outputs := [])
    state.pool_map_requested = True
    state.emit_pool_map()
    assert not state.pool_map_requested
    assert [type(one) for one in outputs] == [PoolMap]
