"""Pool map requests: every client gets one answer, even if the engine fails."""

import json
from types import SimpleNamespace

import pytest

from paged_backend.engine import core
from paged_backend.engine.outputs import EngineDied, PoolMap
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.streams.responder import Responder
from tests.support.callers import serving
from tests.support.in_process import WAIT
from tests.support.metric_families import RecordedFamilies
from tests.support.pb_utils import PB_UTILS, Sent
from tests.support.streams import POOL, STATS

ENGINE = SimpleNamespace(busy_seconds=0.0)


@pytest.fixture
def responder():
    made = Responder(ENGINE, Metrics(PB_UTILS, {}), Sessions(60, 1, print), max_model_len=256)
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
            "state_blocks": 0,
            "running": 1,
            "waiting": 0,
            "tokens": 20,
            "cached_tokens_hit": 5,
            "preemptions": 0,
            "max_model_len": 256,
            "sleeping": False,
        }
    responder.request_pool_map(late.channel())
    responder.emit(POOL)
    late.the_only()
    assert first.empty() and second.empty()


def test_metrics_match_pool_map():
    families, held = RecordedFamilies(), []

    class Reader(Sent):
        def send(self, response, flags):
            held.append(families.values["vllm:num_requests_running"][()])
            super().send(response, flags)

    responder = Responder(ENGINE, Metrics(families, {}), Sessions(60, 1, print))
    responder.start()
    for running in (1, 0):  # the second comes before the next regular update of the metrics
        sent = Reader()
        responder.request_pool_map(sent.channel())
        responder.emit(PoolMap(12.5, "12c.", 20, STATS.having(running=running)))
        sent.the_only()
        assert held[-1] == running
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
        Responder(ENGINE, Metrics(PB_UTILS, {}), Sessions(60, 1, print), stall_seconds=0),
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


def test_polling_takes_at_most_its_share_of_the_thread(tiny, monkeypatch):
    """The first map is sent while the request runs; the second has to wait until it has ended."""
    monkeypatch.setattr(core, "MAP_SHARE", 1e-9)
    with serving(tiny[0]) as calls:
        sampling = json.dumps({"max_tokens": 60, "ignore_eos": True})
        answer = calls.call(text_input="abc", stream=True, sampling_parameters=sampling)
        answer.get(timeout=WAIT)
        running = [json.loads(calls.ask(pool_map=True)["pool_map"][0])["running"] for _ in range(2)]
        assert running == [1, 0]
