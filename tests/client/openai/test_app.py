"""Requests to the gateway: ids, adapters, paths and bodies."""

import http.client
import json

import openai
import pytest

from tests.support.gateway import BODIES, PROMPT, WAIT, error_of


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("reason", "expected"), [("timeout", ("length", "timeout")), ("length", ("length", None))])
def test_timeout_finish_reason_is_length(front, says, path, reason, expected, stream):
    with says(say=["a"], reason=reason):
        body = BODIES[path] | {"stream": stream}
        choice = (front.events(path, body)[-1] if stream else front.ask(path, body)[1])["choices"][0]
    assert (choice["finish_reason"], choice.get("stop_reason")) == expected


def test_response_id_is_the_engine_request_id(front, fake):
    status, body = front.ask("/v1/completions", PROMPT)
    assert (status, body["id"]) == (200, fake.requests[-1]["request_id"])


@pytest.mark.parametrize("stream", [False, True])
def test_x_request_id_is_passed_on(front, fake, stream):
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.with_raw_response.create(
        **PROMPT, stream=stream, extra_headers={"X-Request-Id": "mine-1.a:b"}
    )
    assert answer.headers["X-Request-Id"] == "cmpl-mine-1.a:b"
    assert len(list(answer.parse())) > 0
    assert fake.requests[-1]["request_id"] == "cmpl-mine-1.a:b"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00fc"])
def test_unsafe_x_request_id_is_rejected(front, given):
    status, body = front.ask("/v1/completions", PROMPT, {"X-Request-Id": given.encode().decode("latin-1")})
    assert (status, error_of(status, body)["message"].split(":")[0]) == (400, "X-Request-Id")


@pytest.mark.parametrize("path", BODIES)
def test_model_name_selects_an_adapter(front, fake, path):
    status, body = front.ask(path, BODIES[path] | {"model": "fr"})
    assert (status, body["model"], fake.sampling[-1]["lora_name"]) == (200, "fr", "fr")


def test_adapters_are_listed_as_models(front, fake):
    fake.adapters = json.dumps(
        [
            {"name": "fr", "rank": 8, "resident": True, "error": None},
            {"name": "broken", "rank": None, "resident": False, "error": "no such file"},
        ]
    )
    cards = front.ask("/v1/models")[1]["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [("paged_llm", None), ("fr", "paged_llm")]
    assert front.ask("/v1/models/fr")[1] == cards[1]
    assert front.ask("/v1/models/broken")[0] == 404


@pytest.mark.parametrize("path", ["owner/fr", "owner%2Ffr", "owner%2ffr"])
def test_model_name_may_contain_a_slash(front, fake, path):
    fake.adapters = json.dumps([{"name": "owner/fr", "rank": 8, "resident": True, "error": None}])
    assert front.ask(f"/v1/models/{path}")[1]["id"] == "owner/fr"


def test_unknown_path_lists_the_paths(front):
    status, answer = front.ask("/v1/chat/completion", PROMPT)
    message = error_of(status, answer)["message"]
    assert message.startswith("POST /v1/chat/completion: Not Found; the paths are /v1/models, /v1/models/{name}, ")
    assert "/v1/chat/completions, " in message


@pytest.mark.parametrize(("path", "status"), [("/v1/none", 404), ("/v1/models/gpt", 404), ("/v1/completions", 405)])
def test_unknown_path_or_method(front, path, status):
    assert front.ask(path)[0] == status
    error_of(status, front.ask(path)[1])


@pytest.mark.parametrize(
    ("path", "status"),
    [("/live", 200), ("/health", 503), ("/metrics", 200), ("/v1/models", 200), ("/v1/models/paged_llm", 200)],
)
def test_head_requests(front, fake, path, status):
    fake.maps = ["UNAVAILABLE: not yet"]
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT)
    connection.request("HEAD", path)
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (status, b"")
    connection.close()


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Length": "4097"}, 413, "the body exceeds the limit of 4096 bytes"),
        ({"Content-Length": str(10**18)}, 413, "the body exceeds the limit of 4096 bytes"),
        ({"Content-Length": "9", "Content-Encoding": "gzip"}, 415, "Content-Encoding: gzip: not supported"),
    ],
)
def test_invalid_headers_are_rejected_without_the_body(front, headers, status, message):
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", b"", headers)
    reply = connection.getresponse()
    assert (reply.status, error_of(status, json.load(reply))["message"][: len(message)]) == (status, message)
    connection.close()


@pytest.mark.parametrize("declared", [True, False])
def test_oversized_body_is_rejected(front, declared):
    """Its size is declared in a header, or it is chunked."""
    fits = json.dumps(PROMPT).encode().ljust(4096)
    assert front.ask("/v1/completions", fits)[0] == 200
    body = fits + b" "
    status, answer = front.ask("/v1/completions", body) if declared else chunked(front, body)
    assert (status, error_of(status, answer)["code"]) == (413, "request_too_large")
    assert answer["error"]["message"].endswith("exceeds the limit of 4096 bytes (--max-request-bytes)")


def chunked(front, body):
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", iter([body[:2000], body[2000:]]), encode_chunked=True)
    reply = connection.getresponse()
    answer = reply.status, json.load(reply)
    connection.close()
    return answer
