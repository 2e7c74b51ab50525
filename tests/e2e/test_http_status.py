"""HTTP status codes and bodies of errors, as docs/guides/requests.md lists them."""

import json
import socket
import urllib.error
import urllib.request

import pytest

from tests.support.triton import MODEL, idle, metrics
from tests.support.waiting import WAIT, until

GENERATE = f"/v2/models/{MODEL}/generate"
STREAM = f"{GENERATE}_stream"
PROMPT = {"text_input": "x", "max_tokens": 3}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
NOT_TEXT = "attempt to access JSON non-string as string"
EMPTY = "INVALID_ARGUMENT: text_input: the prompt is empty"


def post(server, path, body):
    """Return status, content type and body of a POST request, or of a GET request if `body` is None."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://{server.http_url}{path}", data, timeout=WAIT) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (GENERATE, b"{text_input", 500, "failed to parse the request JSON buffer"),
        (GENERATE, b"", 500, "failed to parse the request JSON buffer: The document is empty"),
        (STREAM, b"{text_input", 500, "failed to parse the request JSON buffer"),
        (GENERATE, PROMPT | {"sampling_parameters": {"max_tokens": 3}}, 500, NOT_TEXT),
        (GENERATE, PROMPT | {"json_schema": {"type": "object"}}, 500, NOT_TEXT),
        (GENERATE, {"messages": [{"role": "user", "content": "x"}]}, 500, NOT_TEXT),
        (GENERATE, {"embedding_request": {"input": "x"}}, 500, NOT_TEXT),
        (GENERATE, {"text_input": 5}, 500, NOT_TEXT),
        (GENERATE, PROMPT | {"temperature": None}, 400, "parameter 'temperature' has invalid type"),
        (GENERATE, PROMPT | {"logit_bias": {"5": 1}}, 400, "parameter 'logit_bias' has invalid type"),
        (GENERATE, {"text_input": ["a", "b"]}, 400, "The schema can not convert input"),
        (GENERATE, None, 405, "Method Not Allowed"),
        (f"/v2/models/{MODEL}/infer", {"inputs": [TENSOR]}, 501, "doesn't support models with decoupled transaction"),
        ("/v2/models/other/generate", PROMPT, 404, "Request for unknown model: 'other' is not found"),
        (f"/v2/models/{MODEL}/versions/7/generate", PROMPT, 404, "version 7 is not found"),
        ("/v2/other", PROMPT, 404, "Not Found"),
        (GENERATE, {}, 400, "INVALID_ARGUMENT: text_input, messages, input_ids: none is given"),
        (GENERATE, PROMPT | {"max_tokens": -1}, 400, "INVALID_ARGUMENT: max_tokens=-1: must be"),
        (STREAM, PROMPT | {"max_tokens": -1, "stream": True}, 400, "INVALID_ARGUMENT: max_tokens=-1: must be"),
        (GENERATE, PROMPT | {"lora_name": "any"}, 400, '"error":"LoRA feature is not enabled."'),
        (GENERATE, PROMPT | {"text_input": ""}, 400, EMPTY),
        (GENERATE, PROMPT | {"text_input": "", "sequence_id": 7, "sequence_start": True}, 400, EMPTY),
        (GENERATE, PROMPT | {"sequence_id": 7}, 400, "INVALID_ARGUMENT: sequence_id=7: no such session"),
    ],
)
def test_status_of_a_rejected_request(tiny_server, path, body, status, text):
    found, kind, reply = post(tiny_server, path, body)
    assert found == status
    assert text in reply
    if "INVALID_ARGUMENT" in text:
        assert kind.startswith("text/event-stream" if path == STREAM else "application/json")
        assert json.loads(reply.removeprefix("data: "))["error"].startswith("Error generating stream: ")


def test_a_stream_over_generate_is_an_error_with_status_200(tiny_server):
    """If the output has several responses; several tokens may arrive in one."""
    body, text = PROMPT | {"stream": True, "max_tokens": 40}, "generate expects model to produce exactly 1 response"

    def fails():
        status, _, reply = post(tiny_server, GENERATE, body)
        assert status == 200
        return text in reply

    until(fails, "an output with several responses")


def test_session_turns_without_text(tiny_server):
    """A turn needs text, except one that only ends the session."""
    turn = PROMPT | {"sequence_id": 3, "ignore_eos": True}
    assert post(tiny_server, GENERATE, turn | {"sequence_start": True})[0] == 200
    status, _, text = post(tiny_server, GENERATE, turn | {"text_input": ""})
    assert (status, EMPTY in text) == (400, True)
    assert post(tiny_server, GENERATE, turn | {"text_input": "more"})[0] == 200  # the session is as it was
    assert post(tiny_server, GENERATE, {"text_input": "", "sequence_id": 3, "sequence_end": True})[0] == 200
    assert "no such session" in post(tiny_server, GENERATE, turn)[2]
    idle(tiny_server)


def stream_request(**changes):
    body = json.dumps({"text_input": "x", "stream": True, "max_tokens": 20, "ignore_eos": True} | changes).encode()
    return f"POST {STREAM} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def read_until_closed(connection):
    connection.settimeout(WAIT)
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_pipelined_streams_lose_responses(tiny_server):
    """A limit of tritonserver 2.51: of several streams sent at once on one connection not all are answered."""
    with socket.create_connection(("localhost", tiny_server.http_port)) as connection:
        connection.sendall(stream_request() * 3)
        assert read_until_closed(connection).count(b"HTTP/1.1 200") < 3
    idle(tiny_server)


def test_half_closed_connection_counts_as_a_disconnect(server):
    before = metrics(server)["paged_requests_finished_total{cancelled}"]
    with socket.create_connection(("localhost", server.http_port)) as connection:
        connection.sendall(stream_request(max_tokens=4000))
        connection.shutdown(socket.SHUT_WR)
        read_until_closed(connection)
    until(lambda: metrics(server)["paged_requests_finished_total{cancelled}"] == before + 1, "the cancellation")
    idle(server)
