"""The gateway in front of several servers: failover, the access log and limits."""

import http.client
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime

import openai
import pytest

from paged_backend.api.errors import QueueFull, TenantLimitReached
from tests.support.client_calls import pool_of
from tests.support.gateway import (
    BODIES,
    CHAT,
    PROMPT,
    WAIT,
    error_of,
    gateway,
    gateway_process,
    recording_server,
    respond_with,
)
from tests.support.waiting import until


@pytest.fixture(scope="module")
def fakes():
    with ExitStack() as stack:
        yield [stack.enter_context(recording_server()) for _ in range(2)]


@pytest.fixture(scope="module")
def front(fakes, tmp_path_factory):
    """A gateway with an unreachable server and two others, which get requests in turn."""
    urls = [part for fake in fakes for part in ("--url", fake.url)]
    with gateway("localhost:1", *urls, "--routing", "round-robin") as made:
        yield made


@pytest.fixture
def client(front):
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=WAIT) as made:
        yield made


def counts(fakes):
    return [len(fake.requests) for fake in fakes]


class TestServers:
    def test_turns_of_a_conversation_go_to_the_same_server(self, fakes):
        """So do requests with the same session or cache key. Conversations are spread over the servers."""
        with gateway(fakes[0].url, "--url", fakes[1].url) as front:

            def server_of(body, **headers):
                before = counts(fakes)
                assert front.ask("/v1/chat/completions", CHAT | body, headers)[0] == 200
                return [now - then for now, then in zip(counts(fakes), before, strict=True)].index(1)

            def turn(number, length):
                messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Number {number}"}]
                later = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
                return {"messages": messages + later * length}

            chosen = []
            for number in range(16):
                (server,) = {server_of(turn(number, length)) for length in range(3)}
                chosen.append(server)
            assert {0, 1} == set(chosen)
            assert len({server_of(turn(number, 0), **{"X-Session-Id": "s"}) for number in range(8)}) == 1
            assert len({server_of(turn(number, 0) | {"prompt_cache_key": "k"}) for number in range(8)}) == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_round_robin_skips_unreachable_servers(self, client, fakes, stream):
        before = counts(fakes)
        for _ in range(6):
            answer = client.completions.create(**PROMPT, stream=stream)
            chunks = list(answer) if stream else [answer]
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello there"
        assert sum(counts(fakes)) == sum(before) + 6

    @pytest.mark.parametrize("stream", [False, True])
    def test_full_server_fails_over_to_the_next(self, front, fakes, stream):
        error = "UNAVAILABLE: the waiting queue is full: 1 requests wait (max_queue_size); retry later"
        with respond_with(fakes[0], say=[], fail=error):
            answers = [front.ask("/v1/completions", PROMPT)[0] for _ in range(3)]
        assert answers == [200] * 3

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        "error", ["INTERNAL: the engine died: RuntimeError: no", "Stub process 'paged_llm_0_0' is not healthy."]
    )
    def test_a_failed_engine_fails_over_to_the_next_server(self, client, fakes, error, stream):
        with respond_with(fakes[0], say=[], fail=error):
            for _ in range(3):
                answer = client.completions.create(**PROMPT, stream=stream)
                chunks = list(answer) if stream else [answer]
                assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello there"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_waits_for_a_server_that_is_restarted(self, fakes, stream):
        with gateway(fakes[0].url, "--retry-seconds", str(WAIT)) as front, ThreadPoolExecutor() as pool:
            with respond_with(fakes[0], say=[], fail="UNAVAILABLE: the engine has stopped"):
                before = len(fakes[0].requests)
                ask = front.events if stream else front.ask
                asked = pool.submit(ask, "/v1/completions", PROMPT | {"stream": stream})
                until(lambda: len(fakes[0].requests) >= before + 2, "a second attempt")
            answer = asked.result(timeout=WAIT)
            assert answer if stream else answer[0] == 200

    def test_a_request_does_not_wait_longer_than_the_retry_seconds(self, fakes):
        with (
            gateway(fakes[0].url, "--retry-seconds", "1") as front,
            respond_with(fakes[0], say=[], fail="UNAVAILABLE: the engine has stopped"),
        ):
            assert front.ask("/v1/completions", PROMPT)[0] == 503

    def test_invalid_request_does_not_fail_over(self, front, fakes):
        before = sum(counts(fakes))
        with (
            respond_with(fakes[0], say=[], fail="INVALID_ARGUMENT: n=0: no"),
            respond_with(fakes[1], say=[], fail="INTERNAL: no"),
        ):
            statuses = {front.ask("/v1/completions", PROMPT)[0] for _ in range(3)}
        assert statuses <= {400, 500}
        assert sum(counts(fakes)) == before + 3

    def test_an_output_that_is_too_large_is_not_computed_again(self, front, fakes):
        large = {"say": [], "fail": "UNAVAILABLE: its answer is larger than max_response_mib=1; ask for fewer tokens"}
        before = sum(counts(fakes))
        with respond_with(fakes[0], **large), respond_with(fakes[1], **large):
            assert front.ask("/v1/completions", PROMPT)[0] == 503
        assert sum(counts(fakes)) == before + 1

    @pytest.mark.parametrize("error", [TenantLimitReached(3), QueueFull(1)], ids=lambda error: error.outcome)
    def test_the_limit_of_a_tenant_is_no_failure_of_the_server(self, fakes, error):
        """Conversations of other tenants stay at their server, which has cached their beginning."""
        with gateway(fakes[0].url, "--url", fakes[1].url) as front:
            before = counts(fakes)
            assert front.ask("/v1/completions", PROMPT)[0] == 200
            (home,) = (fake for fake, count in zip(fakes, before, strict=True) if len(fake.requests) > count)
            with respond_with(home, say=[], fail=str(error)):
                assert front.ask("/v1/completions", PROMPT)[0] == 200  # by the other server
            before = len(home.requests)
            front.ask("/v1/completions", PROMPT)
            assert (len(home.requests) > before) == isinstance(error, TenantLimitReached)

    @pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
    def test_timed_out_request_does_not_fail_over(self, front, fakes, path):
        late = {"say": [], "fail": "DEADLINE_EXCEEDED: the time limit passed"}
        before = sum(counts(fakes))
        with respond_with(fakes[0], **late), respond_with(fakes[1], **late):
            status, body = front.ask(path, BODIES.get(path, {"model": "paged_llm", "input": "x"}))
        assert (status, error_of(status, body)["code"]) == (504, "deadline_exceeded")
        assert sum(counts(fakes)) == before + 1

    def test_started_stream_does_not_fail_over(self, client, fakes):
        before = sum(counts(fakes))
        fail = {"say": ["a"], "fail": "UNAVAILABLE: the engine has stopped"}
        with respond_with(fakes[0], **fail), respond_with(fakes[1], **fail):
            stream = client.completions.create(**PROMPT, stream=True)
            assert next(stream).choices[0].text == "a"
            with pytest.raises(openai.APIError, match="the engine has stopped"):
                next(stream)
        assert sum(counts(fakes)) == before + 1

    def test_error_of_a_stream_whose_server_ends(self):
        with (
            recording_server() as fake,
            gateway(fake.url) as front,
            respond_with(fake, say=["a"], vanish=True),
            openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = client.completions.create(**PROMPT, stream=True)
            assert next(stream).choices[0].text == "a"
            reason = f"the server at {fake.url} ended or cannot be reached any more, while it was answering: ."
            with pytest.raises(openai.APIError, match=reason):
                next(stream)

    def test_error_of_the_last_server_is_returned(self, front, fakes):
        full = {"say": [], "fail": "UNAVAILABLE: the queue is full"}
        with respond_with(fakes[0], **full), respond_with(fakes[1], **full):
            statuses = [front.ask("/v1/completions", PROMPT)[0] for _ in range(3)]
        assert statuses == [503] * 3


def test_metrics_are_counted_per_route(fakes):
    with gateway(fakes[0].url) as front:
        front.ask("/v1/completions", PROMPT)
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            list(client.chat.completions.create(**CHAT, stream=True))
        with respond_with(fakes[0], say=["[1.0]"], receipt='{"cached_tokens": 3}'):
            assert front.ask("/v1/embeddings", {"model": "paged_llm", "input": ["x", "y"]})[0] == 200
        values = front.metrics()
    assert values['paged_openai_tokens_total{kind="prompt",route="/v1/embeddings"}'] == 14
    assert values['paged_openai_tokens_total{kind="cached",route="/v1/embeddings"}'] == 6
    for route, output in (("/v1/completions", 4), ("/v1/chat/completions", 4)):
        assert values[f'paged_openai_tokens_total{{kind="prompt",route="{route}"}}'] == 7
        assert values[f'paged_openai_tokens_total{{kind="output",route="{route}"}}'] == output
        for name in ("paged_openai_request_seconds", "paged_openai_first_byte_seconds"):
            assert (
                values[f'{name}_count{{route="{route}"}}'] == values[f'{name}_bucket{{le="+Inf",route="{route}"}}'] == 1
            )
            assert 0 < values[f'{name}_sum{{route="{route}"}}'] < WAIT


def test_access_log_has_every_request_and_no_key(fakes, tmp_path):
    log = tmp_path / "log"
    flags = ("--access-log", "--api-key", "hush")
    with log.open("w") as errors, gateway_process(fakes[0].url, *flags, errors=errors) as front:
        key = {"Authorization": "Bearer hush"}
        front.ask("/v1/completions", PROMPT, key | {"X-Request-Id": "mine"})
        front.ask("/v1/models", headers={"Authorization": "Bearer hush-hush"})
        front.ask("/made%0Aup")
        values = front.metrics()
    *lines, _ = [json.loads(line) for line in log.read_text().splitlines()]  # the last is that of the metrics
    assert [(one["method"], one["path"], one["status"], one["id"]) for one in lines] == [
        ("POST", "/v1/completions", 200, "cmpl-mine"),
        ("GET", "/v1/models", 401, ""),
        ("GET", "/made\nup", 404, ""),
    ]
    assert {one["client"] for one in lines} == {"127.0.0.1"}
    assert all(datetime.fromisoformat(one["time"].replace("Z", "+00:00")) for one in lines)
    for one in lines[:2]:
        spent = values[f'paged_openai_request_seconds_sum{{route="{one["path"]}"}}']
        assert 0 < one["seconds"] == pytest.approx(spent, abs=1e-4)
    assert "hush" not in log.read_text()


def test_max_open_requests(fakes):
    """A request counts as open while its body is still being received."""
    with gateway(fakes[0].url, "--max-open-requests", "2") as front:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99\r\n\r\n"
        with ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", front.port), WAIT))
                connection.sendall(head)
                assert b"100 Continue" in connection.recv(99)  # its body is waited for
            status, answer = front.ask("/v1/completions", PROMPT)
            assert (status, answer["error"]["type"], answer["error"]["code"]) == (503, "server_error", "unavailable")
            assert "2 requests are open, the limit (--max-open-requests)" in answer["error"]["message"]
            assert front.ask("/live")[0] == 200
        gone = 'paged_openai_requests_total{route="/v1/completions",status="499"}'
        until(lambda: front.metrics().get(gone) == 2, "the end of both")
        assert front.ask("/v1/completions", PROMPT)[0] == 200


def test_max_open_bytes(fakes):
    """Large bodies that are received or whose requests are open keep large ones out, and no small ones."""
    large = 100_000
    with gateway(fakes[0].url, "--max-open-bytes", "50000") as front:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {large}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", front.port), WAIT) as first:
            first.sendall(head + b" " * (large - 1))
            until(lambda: front.ask("/v1/completions", PROMPT | {"user": "x" * large})[0] == 503, "the limit")
            status, answer = front.ask("/v1/completions", PROMPT | {"user": "x" * large})
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert (
                "bodies of open requests have 50000 bytes, the limit (--max-open-bytes)" in answer["error"]["message"]
            )
            assert front.ask("/v1/completions", PROMPT | {"user": "x" * 60_000})[0] == 200
        until(lambda: front.ask("/v1/completions", PROMPT | {"user": "x" * large})[0] == 200, "room")


def test_body_timeout_frees_the_slot(fakes):
    """The timeout applies to a body that stops and to one that arrives byte by byte."""
    with gateway(fakes[0].url, "--max-open-requests", "2", "--body-timeout", "2") as front, ExitStack() as stack:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        silent, slow = (
            stack.enter_context(socket.create_connection(("127.0.0.1", front.port), WAIT)) for _ in range(2)
        )
        for connection in (silent, slow):
            connection.sendall(head)
        while not select.select([slow], [], [], 0.05)[0]:
            slow.sendall(b" ")
        for connection in (silent, slow):
            reply = stack.enter_context(http.client.HTTPResponse(connection))
            reply.begin()
            error = error_of(reply.status, json.load(reply))
            assert (reply.status, error["code"], reply.headers["Connection"]) == (408, "request_timeout", "close")
            assert error["message"] == "the body was not fully received within the limit of 2 s (--body-timeout)"
            assert is_closed(connection)
        assert front.ask("/v1/completions", PROMPT)[0] == 200


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # by a byte that was still on its way
        return True


def test_gateway_is_live_without_a_server():
    with gateway("localhost:1") as front:
        assert front.ask("/live") == (200, {"status": "ok"})
        assert front.ask("/health")[0] == 503


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_questions_about_the_servers_are_not_retried(path):
    with gateway("localhost:1", "--retry-seconds", str(WAIT)) as front:
        asked = time.monotonic()
        assert front.ask(path)[0] == 503
        assert time.monotonic() - asked < WAIT / 2


def test_the_gateway_is_healthy_while_one_server_answers(fakes, monkeypatch):
    monkeypatch.setattr(fakes[0], "script", lambda inputs, request_id: {"say": [], "hold": True})
    monkeypatch.setattr(fakes[1], "maps", [json.dumps(pool_of(".."))])
    with gateway(fakes[0].url, "--url", fakes[1].url) as front:
        assert [front.ask("/health")[0] for _ in range(3)] == [200] * 3
