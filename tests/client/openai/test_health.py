"""/health: what it says, and how often it asks the servers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_client.openai import health
from tests.support.fake_servers import SERVERS, WAIT
from tests.support.gateway import error_of, gateway
from tests.support.map_views import pool_of, sent

AWAKE, ASLEEP = (sent(pool_of("..", sleeping=sleeping)) for sleeping in (False, True))


@pytest.fixture(scope="module")
def two():
    with SERVERS["grpc"]() as first, SERVERS["grpc"]() as second, gateway(first.url, "--url", second.url) as front:
        yield first, second, front


@pytest.mark.parametrize(
    ("maps", "status", "reason"),
    [
        ((ASLEEP, AWAKE), 200, None),
        ((ASLEEP, ASLEEP), 503, "the model is asleep; `paged wake` wakes it"),
        (("UNAVAILABLE: no", ASLEEP), 503, "the model is asleep; `paged wake` wakes it"),
        (("UNAVAILABLE: no", "UNAVAILABLE: no"), 503, "the model is not ready: "),
    ],
)
def test_a_server_that_is_awake_is_needed(two, monkeypatch, maps, status, reason):
    first, second, front = two
    monkeypatch.setattr(health, "AGE_SECONDS", 0)
    first.maps, second.maps = ([one] for one in maps)
    front.ask("/health")  # may still be an earlier answer
    found, body = front.ask("/health")
    assert found == status
    assert reason is None or error_of(found, body)["message"].startswith(reason)


def test_servers_are_asked_once_for_many_questions(two, monkeypatch):
    *servers, front = two
    monkeypatch.setattr(health, "AGE_SECONDS", 0)
    front.ask("/health")
    monkeypatch.setattr(health, "AGE_SECONDS", WAIT)
    asked, answer = [], threading.Event()

    def script(inputs, request_id):
        asked.append(inputs)
        assert answer.wait(WAIT)
        return {"map": AWAKE}

    for server in servers:
        monkeypatch.setattr(server, "script", script)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(front.ask, "/health") for _ in range(8)]
        answer.set()
        assert {one.result()[0] for one in found} == {200}
    assert front.ask("/ping", {})[0] == 200
    assert len(asked) <= 2, "one question to each server"
