"""/health: what it says, and how often it asks the server."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_client.openai import health
from tests.support.fake_servers import WAIT
from tests.support.gateway import error_of, gateway
from tests.support.map_views import pool_of, sent

AWAKE, ASLEEP = (sent(pool_of("..", sleeping=sleeping)) for sleeping in (False, True))


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (AWAKE, 200, None),
        (ASLEEP, 503, "no model is awake; `paged wake` wakes one"),
        ("UNAVAILABLE: no", 503, "no model is ready: "),
    ],
)
def test_a_model_that_is_awake_is_needed(fake, front, monkeypatch, answer, status, reason):
    monkeypatch.setattr(health, "AGE_SECONDS", 0)
    monkeypatch.setattr(fake, "maps", [answer])
    front.ask("/health")  # may still be an earlier answer
    found, body = front.ask("/health")
    assert found == status
    assert reason is None or error_of(found, body)["message"].startswith(reason)


def test_the_gateway_is_live_without_a_server():
    with gateway("localhost:1") as front:
        assert front.ask("/live") == (200, {"status": "ok"})
        assert front.ask("/health")[0] == 503


def test_the_server_is_asked_once_for_many_questions(fake, front, monkeypatch):
    monkeypatch.setattr(health, "AGE_SECONDS", 0)
    monkeypatch.setattr(fake, "maps", [AWAKE])
    front.ask("/health")
    monkeypatch.setattr(health, "AGE_SECONDS", WAIT)
    asked, answer = [], threading.Event()

    def script(inputs, request_id):
        asked.append(inputs)
        assert answer.wait(WAIT)
        return {"map": AWAKE}

    monkeypatch.setattr(fake, "script", script)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(front.ask, "/health") for _ in range(8)]
        answer.set()
        assert {one.result()[0] for one in found} == {200}
    assert front.ask("/ping", {})[0] == 200
    assert len(asked) == 1
