"""Requests to the gateway: ids, adapters, paths, headers and bodies."""

import http.client
import json
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import openai
import pytest

from paged_client import cli
from paged_client.openai import app, schema, translation
from tests.support.gateway import BODIES, CHAT, PROMPT, WAIT, error_of, gateway
from tests.support.map_views import pool_of, sent
from tests.support.openai_tools import TOOLS


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


def test_cards_name_the_model_whose_weights_they_have(front, fake):
    fake.adapters = json.dumps([{"name": "fr", "rank": 8, "resident": True, "error": None}])
    assert {(card["root"], card["parent"]) for card in front.ask("/v1/models")[1]["data"]} == {
        ("paged_llm", None),
        ("paged_llm", "paged_llm"),
    }


def test_other_requests_go_on_while_a_large_body_is_parsed(front, monkeypatch):
    validate, parsing, may_end = schema.validate, threading.Event(), threading.Event()

    def slow(kind, values):
        parsing.set()
        assert may_end.wait(WAIT)
        return validate(kind, values)

    monkeypatch.setattr(schema, "validate", slow)
    monkeypatch.setattr(app, "SMALL_BYTES", 1000)
    with ThreadPoolExecutor() as pool:
        large = pool.submit(front.ask, "/v1/completions", PROMPT | {"prompt": "a" * 2000})
        assert parsing.wait(WAIT)
        assert front.ask("/live")[0] == 200
        may_end.set()
        assert large.result()[0] == 200


def test_version_and_load(front):
    assert front.ask("/version") == (200, {"version": version("paged-llm-triton")})
    assert front.ask("/load") == (200, {"server_load": 0})


@pytest.fixture(scope="module")
def published(fake):
    """A gateway behind a proxy, for web pages."""
    flags = ["--root-path", "/llm", "--allowed-origin", "https://chat.example", "--api-key", "k"]
    with gateway(fake.url, *flags) as made:
        yield made


def test_root_path_may_precede_paths(published):
    key = {"Authorization": "Bearer k"}
    for path in ("/llm/v1/completions", "/v1/completions"):
        assert published.ask(path, PROMPT, key)[0] == 200
        assert published.ask(path, PROMPT)[0] == 401
    assert (
        published.metrics()['paged_openai_tokens_total{kind="output",model="paged_llm",route="/v1/completions"}'] == 8
    )


@pytest.mark.parametrize(("origin", "allowed"), [("https://chat.example", "https://chat.example"), ("http://x", None)])
def test_pages_of_allowed_origins_may_send_requests(published, origin, allowed):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api"}
    connection = http.client.HTTPConnection("127.0.0.1", published.port, timeout=WAIT)
    connection.request("OPTIONS", "/v1/completions", headers=asked)
    reply = connection.getresponse()
    assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200 if allowed else 400, allowed)
    reply.read()
    connection.request("POST", "/v1/completions", "{}", {"Origin": origin, "Authorization": "Bearer k"})
    reply = connection.getresponse()
    assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (400, allowed)
    connection.close()


def test_pages_of_other_origins_may_not_by_default(front):
    with urllib.request.urlopen(urllib.request.Request(f"{front.url}/live", headers={"Origin": "http://x"})) as reply:
        assert reply.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("flags", [("--allowed-origin", "chat.example"), ("--root-path", "llm/")])
def test_invalid_origin_or_root_path(capsys, flags):
    with pytest.raises(SystemExit):
        cli.main(["openai", *flags])
    assert f"argument {flags[0]}: {flags[1]!r}: must be" in capsys.readouterr().err


def test_internal_error_is_in_the_log_only(front, caplog, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a secret")

    monkeypatch.setattr(translation, "from_completion", fail)
    for headers in ({"X-Request-Id": "mine"}, {}):
        caplog.clear()
        status, body = front.ask("/v1/completions", PROMPT, headers)
        message = error_of(status, body)["message"]
        assert (status, "secret" in message) == (500, False)
        request_id = message.rsplit(" ", 1)[1]
        assert request_id == headers.get("X-Request-Id", request_id)
        assert f"request {request_id}: internal error: RuntimeError: a secret" in caplog.messages


def test_request_with_two_lengths_is_rejected_and_its_connection_closed(front, fake):
    """What follows could be a request that a proxy has not seen."""
    body = json.dumps(PROMPT).encode()
    hidden = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    sent = b"0\r\n\r\n" + hidden
    before = len(fake.requests)
    with socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head % len(sent) + sent)
        with connection.makefile("rb") as reply:
            text = reply.read().decode()
    assert text.startswith("HTTP/1.1 400 ") and text.count("HTTP/1.1") == 1
    assert "Content-Length: cannot be combined with Transfer-Encoding" in text
    assert len(fake.requests) == before


class TestTokens:
    def test_tokenize(self, front, fake, says):
        fake.maps = [sent(pool_of(".", max_model_len=64))]  # which may have been read before
        with says(say=["x"], prompt_token_ids=[5, 7]):
            status, answer = front.ask("/tokenize", {"prompt": "x", "add_special_tokens": False, "temperature": 3})
        assert isinstance(answer.pop("max_model_len"), int | None)
        assert (status, answer) == (200, {"count": 2, "tokens": [5, 7], "token_strs": None})
        assert fake.sampling[-1] == {"max_tokens": 1, "add_special_tokens": False}

    def test_tokenize_a_conversation(self, front, fake, says):
        more = {"add_generation_prompt": False, "tools": TOOLS, "tool_choice": "required"}
        with says(say=["x"], prompt_token_ids=[5]):
            assert front.ask("/tokenize", {"messages": CHAT["messages"], **more})[1]["tokens"] == [5]
        asked = [one for one in fake.requests if "pool_map" not in one][-1]
        assert json.loads(asked["messages"]) == CHAT["messages"]
        assert json.loads(asked["chat_template_kwargs"]) == {"add_generation_prompt": False}
        assert json.loads(asked["tools"]) == TOOLS
        assert fake.sampling[-1] == {"max_tokens": 1}

    def test_detokenize(self, front, fake):
        assert front.ask("/detokenize", {"tokens": [5, 7]}) == (200, {"prompt": "Hello there"})
        assert fake.requests[-1]["input_ids"] == [5, 7]
        assert fake.sampling[-1] == {"max_tokens": 0, "echo": True, "skip_special_tokens": False}

    @pytest.mark.parametrize(
        ("path", "body", "named"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": ["x"]}, "prompt"),
            ("/tokenize", {"prompt": "x", "return_token_strs": True}, "return_token_strs"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": []}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ],
    )
    def test_wrong_values_are_rejected(self, front, path, body, named):
        status, answer = front.ask(path, body)
        assert (status, error_of(status, answer)["param"]) == (400, named)

    def test_wrong_token_is_named(self, front, says):
        status, answer = front.ask("/detokenize", {"tokens": [5, -1]})
        error = error_of(status, answer)
        assert (status, error["param"]) == (400, "tokens")
        assert error["message"] == "tokens[1]=-1: must be a token id, 0..2147483647"
        with says(fail="INVALID_ARGUMENT: input_ids[0]=999: must be 0..319"):
            status, answer = front.ask("/detokenize", {"tokens": [999]})
        assert error_of(status, answer)["message"] == "tokens[0]=999: must be 0..319"


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
