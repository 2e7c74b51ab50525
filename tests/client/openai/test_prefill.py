"""The gateway with prefill servers: which requests they get, and what happens if they fail."""

import json
import socket
from contextlib import ExitStack

import pytest

from tests.support.gateway import CHAT, PROMPT, gateway, recording_server, respond_with

LONG = "word " * 20  # 25 tokens by the estimate
FLAGS = ("--prefill-min-tokens", "20")
DONE = {"say": [""], "reason": "length", "receipt": json.dumps({"stored_tokens": 16})}


@pytest.fixture(scope="module")
def fakes():
    """(server of the requests, prefill server)"""
    with ExitStack() as stack:
        yield [stack.enter_context(recording_server()) for _ in range(2)]


@pytest.fixture(scope="module")
def front(fakes):
    with gateway(fakes[0].url, "--prefill-url", fakes[1].url, *FLAGS) as made:
        yield made


@pytest.fixture(autouse=True)
def prefills(fakes):
    """The requests that the prefill server gets."""
    for fake in fakes:
        fake.requests.clear()
        fake.sampling.clear()
    with respond_with(fakes[1], **DONE):
        yield fakes[1].requests


def ask(front, path="/v1/completions", **fields):
    body = (CHAT if "chat" in path else PROMPT) | fields
    status, answer = front.ask(path, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_server_gets_long_prompts_first(front, fakes, prefills, stream):
    if stream:
        front.events("/v1/completions", PROMPT | {"prompt": LONG, "stream": True, "cache_salt": "tenant"})
    else:
        ask(front, prompt=LONG, cache_salt="tenant", temperature=0.5, stop=["x"], n=2)
    (first,), (second,) = prefills, fakes[0].requests
    assert first["text_input"] == second["text_input"] == LONG
    assert fakes[1].sampling == [{"prefill_only": True, "cache_salt": "tenant"}]
    assert "prefill_only" not in fakes[0].sampling[0]


def test_conversations_have_the_same_prompt_on_both_servers(front, fakes, prefills):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": LONG}]
    more = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    ask(front, "/v1/chat/completions", messages=messages, **more)
    for name in ("messages", "tools", "chat_template_kwargs"):
        assert prefills[0][name] == fakes[0].requests[0][name]
    assert json.loads(prefills[0]["messages"])[0]["role"] == "system"


def test_only_messages_after_the_last_answer_count(front, prefills):
    question, answer = {"role": "user", "content": LONG}, {"role": "assistant", "content": LONG}
    ask(front, "/v1/chat/completions", messages=[question, answer, {"role": "user", "content": "And?"}])
    assert not prefills
    ask(front, "/v1/chat/completions", messages=[question, answer, question])
    assert len(prefills) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "short"},
        {"prompt": list(range(19))},
        {"prompt": LONG, "model": "adapter"},
        {"prompt": LONG, "truncate_prompt_tokens": 3},
        {"prompt": LONG, "prompt_logprobs": 1},
    ],
)
def test_other_requests_are_not_sent_to_prefill_servers(front, fakes, prefills, fields):
    ask(front, **fields)
    assert not prefills
    assert len(fakes[0].requests) == 1


def test_each_prompt_of_a_request_is_computed(front, fakes, prefills):
    ask(front, prompt=[LONG, "short", LONG + "more"])
    assert sorted(one["text_input"] for one in prefills) == [LONG, LONG + "more"]
    assert {one["request_id"] for one in prefills} < {one["request_id"] for one in fakes[0].requests}


def test_time_limit_covers_both_servers(front, fakes):
    ask(front, prompt=LONG, timeout_ms=60_000)
    assert fakes[1].sampling[0]["timeout_ms"] == 60_000
    assert fakes[0].sampling[0]["timeout_ms"] < 60_000


@pytest.mark.parametrize(
    "script",
    [
        {"say": [], "fail": "INVALID_ARGUMENT: prefill_only=true: needs a remote cache"},
        {"say": [], "fail": "UNAVAILABLE: the waiting queue is full"},
        {"say": [], "vanish": True},
        {"say": [""], "reason": "length", "receipt": json.dumps({"stored_tokens": 0})},
    ],
)
def test_server_of_the_request_answers_if_the_prompt_is_not_stored(capsys, script):
    with recording_server() as fake, recording_server() as prefill:
        prefill.scripted_response = script
        with gateway(fake.url, "--prefill-url", prefill.url, *FLAGS) as front:
            for _ in range(2):
                assert ask(front, prompt=LONG)["choices"][0]["text"] == "Hello there"
            assert front.metrics()['paged_openai_prefills_total{outcome="failed"}'] == 2
    text = capsys.readouterr().err
    assert text.count("prompts are computed by the servers of the requests until this has changed") == 1


def test_unreachable_prefill_server_is_passed_over(fakes, prefills):
    with socket.create_server(("localhost", 0)) as closed:
        url = f"localhost:{closed.getsockname()[1]}"
    with gateway(fakes[0].url, "--prefill-url", url, "--prefill-url", fakes[1].url, *FLAGS) as front:
        for _ in range(3):
            ask(front, prompt=LONG)
        assert front.metrics()['paged_openai_prefills_total{outcome="stored"}'] == 3
    assert len(prefills) == 3


def test_prefill_server_that_does_not_answer_is_given_up(fakes, capsys):
    with recording_server() as prefill:
        prefill.scripted_response = {"say": [], "hold": True}
        flags = ["--prefill-url", prefill.url, *FLAGS, "--prefill-timeout", "0.2"]
        with gateway(fakes[0].url, *flags) as front:
            ask(front, prompt=LONG)
        assert prefill.left.wait(30)
    assert "no prefill server has computed a prompt within 0.2 s (--prefill-timeout)" in capsys.readouterr().err


def test_client_that_disconnects_cancels_the_prefill(fakes):
    with recording_server() as prefill:
        prefill.scripted_response = {"say": [], "hold": True}
        with gateway(fakes[0].url, "--prefill-url", prefill.url, *FLAGS) as front:
            body = json.dumps(PROMPT | {"prompt": LONG}).encode()
            with socket.create_connection(("127.0.0.1", front.port)) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body)
                assert prefill.asked.wait(30)
            assert prefill.left.wait(30)
        assert not fakes[0].requests
