"""Pool maps, from the engine to the clients: every caller gets one answer, even if the engine fails."""

import json
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.outputs import EngineDied, PoolMap
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from paged_backend.server.metrics import Metrics
from paged_backend.server.responder import Responder
from paged_backend.server.sessions import Sessions
from paged_backend.server.tenants import Tenants
from tests.support.in_process import WAIT, tiny_assembly
from tests.support.pb_utils import PB_UTILS, Sent
from tests.support.streams import POOL, STATS

ENGINE = SimpleNamespace(busy_seconds=0.0)


@pytest.fixture
def responder():
    made = Responder(ENGINE, Metrics(PB_UTILS, {}), Sessions(60, 1, print), Tenants(0))
    made.start()
    yield made
    made.stop()


def test_every_caller_gets_next_pool_map_once(responder):
    first, second, late = Sent(), Sent(), Sent()
    responder.request_pool_map(first.channel())
    responder.request_pool_map(second.channel())
    responder.emit(POOL)
    for sent in (first, second):
        tensors, error, final = sent.the_only()
        assert error is None and final
        (text,) = tensors["pool_map"]
        assert json.loads(text) == {
            "time": 12.5,
            "block_size": 16,
            "num_blocks": 4,
            "states": "12c.",
            "running": 1,
            "waiting": 0,
            "tokens": 20,
            "cached_tokens_hit": 5,
            "preemptions": 0,
        }
    responder.request_pool_map(late.channel())
    responder.emit(POOL)
    late.the_only()
    assert first.empty() and second.empty()


def test_metrics_match_pool_map():
    shown, held = [], []

    class RecordedMetrics(Metrics):
        def show(self, stats):
            shown.append(stats)

    class Reader(Sent):
        def send(self, response, flags):
            held.append(list(shown))
            super().send(response, flags)

    responder = Responder(ENGINE, RecordedMetrics(PB_UTILS, {}), Sessions(60, 1, print), Tenants(0))
    responder.start()
    for running in (1, 0):  # the second comes before the next regular update of the metrics
        sent = Reader()
        responder.request_pool_map(sent.channel())
        responder.emit(PoolMap(12.5, "12c.", 20, replace(STATS, running=running)))
        sent.the_only()
        assert held[-1][-1].running == running
    responder.stop()


def test_engine_failure_answers_waiting_and_new_callers(responder):
    waiting, late = Sent(), Sent()
    responder.request_pool_map(waiting.channel())
    responder.emit(EngineDied("the engine died: fault"))
    responder.request_pool_map(late.channel())
    for sent in (waiting, late):
        assert sent.the_only() == ({}, "Error generating stream: INTERNAL: the engine died: fault", True)


def test_stalled_engine_times_out_pool_map():
    made, waiting = (
        Responder(ENGINE, Metrics(PB_UTILS, {}), Sessions(60, 1, print), Tenants(0), stall_seconds=0),
        Sent(),
    )
    made.start()
    made.request_pool_map(waiting.channel())
    reason = "the engine has not reported its block pool within 0 s"
    assert waiting.the_only() == ({}, f"Error generating stream: UNAVAILABLE: {reason}", True)
    made.emit(POOL)  # late
    made.stop()
    assert waiting.empty()


def test_send_failure_affects_only_its_client(responder):
    broken, intact = Sent(trouble=1), Sent()
    responder.request_pool_map(broken.channel())
    responder.request_pool_map(intact.channel())
    responder.emit(POOL)
    assert intact.the_only()[1] is None
    assert broken.the_only() == ({}, "Error generating stream: INTERNAL: RuntimeError: the pipe broke", True)


def test_pool_map_of_running_scheduler():
    """Two samples of a prompt of two and a half blocks: a block that both hold counts once."""
    scheduler = Scheduler(BlockManager(8, 4, caching=True), max_num_seqs=2, max_num_batched_tokens=16)
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
    assert sorted(pool.states) == [*"......cc"]
    assert (pool.tokens, pool.stats.running) == (0, 0)


def test_engine_emits_one_pool_map_for_concurrent_callers(tiny):
    assembly, steps = tiny_assembly(tiny[0]), SimpleQueue()
    engine = assembly.engine(steps.put)
    for _ in range(5):
        engine.snapshot_pool()
    engine.start()
    assert isinstance(steps.get(timeout=WAIT), PoolMap)
    engine.stop()
    assert steps.empty()
