"""The gateway in front of a server: retries, the access log and limits."""

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

from paged_client.serving.ports import choose_ports
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


def text_of(fake, front, path="/v1/completions", stream=False, **script):
    """Ask for a completion. The server answers the first request with this script, and later ones as usual."""
    scripts = iter([script])
    with respond_with(fake, lambda inputs: next(scripts, {"say": ["Hello", " there"]})):
        answers = front.events(path, PROMPT | {"stream": True}) if stream else [front.ask(path, PROMPT)[1]]
    return "".join(choice["text"] for answer in answers for choice in answer["choices"])


@pytest.fixture(scope="module")
def patient(fake):
    with gateway(fake.url, "--retry-seconds", str(WAIT)) as made:
        yield made


class TestRetries:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        "error",
        [
            "UNAVAILABLE: the engine has stopped",
            "UNAVAILABLE: the waiting queue is full: 1 requests wait (max_queue_size); retry later",
            "INTERNAL: the engine died: RuntimeError: no",
            "Stub process 'paged_llm_0_0' is not healthy.",
        ],
    )
    def test_a_request_without_output_is_sent_again(self, fake, patient, error, stream):
        assert text_of(fake, patient, stream=stream, say=[], fail=error) == "Hello there"

    def test_embeddings_are_requested_again(self, fake, patient):
        scripts = iter([{"say": [], "fail": "UNAVAILABLE: the engine has stopped"}])
        with respond_with(fake, lambda inputs: next(scripts, {"say": ["[1.0]"]})):
            assert patient.ask("/v1/embeddings", {"model": "paged_llm", "input": "x"})[0] == 200

    def test_a_request_waits_for_a_server_that_is_started_later(self):
        (port,) = choose_ports(port=0)
        with gateway(f"localhost:{port}", "--retry-seconds", str(WAIT)) as front, ThreadPoolExecutor() as pool:
            asked = pool.submit(front.ask, "/v1/completions", PROMPT)
            with recording_server(port) as fake:
                assert asked.result(timeout=WAIT)[0] == 200
                assert len(fake.requests) == 1

    def test_a_request_does_not_wait_longer_than_the_retry_seconds(self, fake):
        with (
            gateway(fake.url, "--retry-seconds", "1") as front,
            respond_with(fake, say=[], fail="UNAVAILABLE: the engine has stopped"),
        ):
            assert front.ask("/v1/completions", PROMPT)[0] == 503

    @pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
    @pytest.mark.parametrize(
        ("error", "status"),
        [
            ("INVALID_ARGUMENT: n=0: no", 400),
            ("INTERNAL: no", 500),
            ("DEADLINE_EXCEEDED: the time limit passed", 504),
            ("UNAVAILABLE: its answer is larger than max_response_mib=1; ask for fewer tokens", 503),
        ],
    )
    def test_other_errors_are_returned(self, fake, patient, path, error, status):
        before = len(fake.requests)
        with respond_with(fake, say=[], fail=error):
            found, body = patient.ask(path, BODIES.get(path, {"model": "paged_llm", "input": "x"}))
        assert (found, error_of(found, body)["code"]) == (status, error.partition(":")[0].lower())
        assert len(fake.requests) == before + 1

    def test_a_stream_with_output_is_not_sent_again(self, fake, patient):
        before = len(fake.requests)
        with (
            respond_with(fake, say=["a"], fail="UNAVAILABLE: the engine has stopped"),
            openai.OpenAI(base_url=f"{patient.url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = client.completions.create(**PROMPT, stream=True)
            assert next(stream).choices[0].text == "a"
            with pytest.raises(openai.APIError, match="the engine has stopped"):
                next(stream)
        assert len(fake.requests) == before + 1

    def test_a_client_that_leaves_ends_the_retries(self, fake, patient):
        with respond_with(fake, say=[], fail="UNAVAILABLE: the engine has stopped"):
            body = json.dumps(PROMPT).encode()
            before = len(fake.requests)
            with socket.create_connection(("127.0.0.1", patient.port)) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body)
                until(lambda: len(fake.requests) > before, "the request")
            gone = 'paged_openai_requests_total{model="paged_llm",route="/v1/completions",status="499"}'
            until(lambda: patient.metrics().get(gone), "the end of the request")

    @pytest.mark.parametrize("path", ["/health", "/v1/models"])
    def test_questions_about_the_server_are_not_retried(self, path):
        with gateway("localhost:1", "--retry-seconds", str(WAIT)) as front:
            asked = time.monotonic()
            assert front.ask(path)[0] == 503
            assert time.monotonic() - asked < WAIT / 2


def test_without_retry_seconds_a_request_is_sent_once(front, fake):
    before = len(fake.requests)
    with respond_with(fake, say=[], fail="UNAVAILABLE: the engine has stopped"):
        assert front.ask("/v1/completions", PROMPT)[0] == 503
    assert len(fake.requests) == before + 1


def test_error_of_a_stream_whose_server_ends():
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


def test_metrics_are_counted_per_route(fake):
    with gateway(fake.url) as front:
        front.ask("/v1/completions", PROMPT)
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none") as client:
            list(client.chat.completions.create(**CHAT, stream=True))
        with respond_with(fake, say=["[1.0]"], receipt='{"cached_tokens": 3}'):
            assert front.ask("/v1/embeddings", {"model": "paged_llm", "input": ["x", "y"]})[0] == 200
        values = front.metrics()
    assert values['paged_openai_tokens_total{kind="prompt",model="paged_llm",route="/v1/embeddings"}'] == 14
    assert values['paged_openai_tokens_total{kind="cached",model="paged_llm",route="/v1/embeddings"}'] == 6
    for route, output in (("/v1/completions", 4), ("/v1/chat/completions", 4)):
        assert values[f'paged_openai_tokens_total{{kind="prompt",model="paged_llm",route="{route}"}}'] == 7
        assert values[f'paged_openai_tokens_total{{kind="output",model="paged_llm",route="{route}"}}'] == output
        labels = f'model="paged_llm",route="{route}"'
        for name in ("paged_openai_request_seconds", "paged_openai_first_byte_seconds"):
            assert values[f"{name}_count{{{labels}}}"] == values[f'{name}_bucket{{le="+Inf",{labels}}}'] == 1
            assert 0 < values[f"{name}_sum{{{labels}}}"] < WAIT


def test_access_log_has_every_request_and_no_key(fake, tmp_path):
    log = tmp_path / "log"
    flags = ("--access-log", "--api-key", "hush")
    with log.open("w") as errors, gateway_process(fake.url, *flags, errors=errors) as front:
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
    for one, model in zip(lines[:2], ("paged_llm", ""), strict=True):
        spent = values[f'paged_openai_request_seconds_sum{{model="{model}",route="{one["path"]}"}}']
        assert 0 < one["seconds"] == pytest.approx(spent, abs=1e-4)
    assert "hush" not in log.read_text()


def test_max_open_requests(fake):
    """A request counts as open while its body is still being received."""
    with gateway(fake.url, "--max-open-requests", "2") as front:
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
        gone = 'paged_openai_requests_total{model="",route="/v1/completions",status="499"}'
        until(lambda: front.metrics().get(gone) == 2, "the end of both")
        assert front.ask("/v1/completions", PROMPT)[0] == 200


def test_max_open_bytes(fake):
    """Large bodies that are received or whose requests are open keep large ones out, and no small ones."""
    large = 100_000
    with gateway(fake.url, "--max-open-bytes", "50000") as front:
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


def test_body_timeout_frees_the_slot(fake):
    """The timeout applies to a body that stops and to one that arrives byte by byte."""
    with gateway(fake.url, "--max-open-requests", "2", "--body-timeout", "2") as front, ExitStack() as stack:
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
