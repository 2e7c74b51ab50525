"""Inbox messages: what each does to announced requests and to the scheduler, and whether statistics follow."""

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.messages import (
    AbortRequest,
    AddRequest,
    EmitStats,
    EndSamples,
    FailEngine,
    RejectRequest,
    ReportUnknown,
    SnapshotPool,
)
from paged_backend.engine.outputs import PoolMap, StepOutput, UnknownRequests
from paged_backend.engine.state import EngineState
from paged_backend.execution.runner import RunnerDied
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.scheduler import Scheduler


def request(key):
    return GenerateRequest(key, tuple(range(6)), SamplingParams(max_tokens=4), 0, frozenset())


@pytest.fixture
def outputs():
    return []


@pytest.fixture
def state(outputs):
    scheduler = Scheduler(BlockManager(8, BlockLayout(4), caching=True), max_num_seqs=2, max_num_batched_tokens=16)
    return EngineState(scheduler, outputs.append)


def test_announced_request_reaches_the_scheduler(state):
    state.announced.add(1)
    assert state.stats().waiting == 1
    assert AddRequest(request(1)).apply(state)
    assert not state.announced
    assert state.scheduler.has_request(1) and state.has_request(1)


def test_request_aborted_before_delivery_is_dropped(state):
    state.announced.add(1)
    assert AbortRequest(1).apply(state)
    assert not AddRequest(request(1)).apply(state)
    assert not state.has_request(1)


def test_running_request_is_aborted_once(state):
    state.announced.add(1)
    AddRequest(request(1)).apply(state)
    state.scheduler.schedule()
    assert AbortRequest(1).apply(state)
    assert not AbortRequest(1).apply(state)


def test_rejected_request_gets_its_error(state, outputs):
    error = RequestError(ErrorCode.INVALID_ARGUMENT, "no")
    state.announced.add(1)
    assert not RejectRequest(1, error).apply(state)
    assert not RejectRequest(1, error).apply(state)
    (output,) = outputs
    assert isinstance(output, StepOutput)
    assert [(delta.key, delta.error) for delta in output.deltas] == [(1, error)]
    assert output.stats.waiting == 0


@pytest.mark.parametrize("index", [0, None])
def test_announced_request_is_ended(state, index):
    state.announced.add(1)
    assert EndSamples(1, index).apply(state)
    assert not state.has_request(1)


def test_stats_are_emitted_only_for_announced_requests(state):
    assert not EmitStats().apply(state)
    state.announced.add(1)
    assert EmitStats().apply(state)


def test_only_untracked_requests_are_reported(state, outputs):
    state.announced |= {1, 2}
    AddRequest(request(1)).apply(state)
    ReportUnknown((1, 2, 3)).apply(state)
    assert outputs == [UnknownRequests((3,))]


def test_pool_map_is_emitted_once(state, outputs):
    SnapshotPool().apply(state)
    SnapshotPool().apply(state)
    assert state.pool_map_requested
    state.emit_pool_map()
    assert [type(output) for output in outputs] == [PoolMap]
    assert not state.pool_map_requested


def test_failure_ends_the_loop(state):
    with pytest.raises(RunnerDied, match="rank 1 has ended"):
        FailEngine("rank 1 has ended").apply(state)
