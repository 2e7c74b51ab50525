"""Tests of the OpenAI gateway with a fake server: requests, errors, API keys, disconnects and chat templates."""

import http.client
import json
import math
import signal
import socket
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial

import openai
import pytest
from pydantic import ValidationError
from pydantic_core import from_json
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from client import cli
from client.openai import command, keys
from client.openai.chat_schema import ChatRequest
from client.openai.embeddings import EmbeddingRequest
from client.openai.errors import ApiError
from client.openai.schema import CompletionRequest, SamplingFields, parse
from paged_backend.api.sampling_params import SamplingParams
from tests.support.gateway import BODIES, CHAT, PROMPT, WAIT, error_of, gateway, recording_server, respond_with
from tests.support.triton import until


@pytest.fixture(scope="module")
def fake():
    with recording_server() as seen:
        yield seen


@pytest.fixture(scope="module")
def front(fake):
    with gateway(fake.url, "--max-request-bytes", "4096", "--max-prompts", "3") as made:
        yield made


@pytest.fixture
def says(fake):
    return partial(respond_with, fake)


# Sampling parameters that have a word of OpenAI's.
OTHERWISE = {"logprobs", "echo", "lora_name"}  # echo is for completions only


def test_sampling_fields_match_the_engine():
    """The client does not depend on the engine, so it has its own list of fields."""
    engines = {spec.name for spec in fields(SamplingParams)}
    assert SamplingFields.model_fields.keys() == engines - OTHERWISE


class TestRequests:
    @pytest.mark.parametrize("path", BODIES)
    def test_sampling_fields_are_passed_to_the_engine(self, front, fake, path):
        fields = {
            "max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "seed": 7,
            "stop": ["a", "b"], "stop_token_ids": [1], "stop_words_token_ids": [[1, 2]],
            "bad_words_token_ids": [[3]], "logit_bias": {"7": -1.5}, "bad_words": ["c"],
            "allowed_token_ids": [1, 7], "ignore_eos": True, "repetition_penalty": 1.5,
            "presence_penalty": 1, "frequency_penalty": -1.0, "skip_special_tokens": False,
            "include_stop_str_in_output": True, "n": 1, "best_of": 2, "beam_width": 2, "length_penalty": 2.0,
            "early_stopping": "never", "priority": 3, "cache_salt": "s", "timeout_ms": 9, "prompt_logprobs": 2,
            "add_special_tokens": True, "truncate_prompt_tokens": 5, "word_bias": {"d": 1.0},
        }  # fmt: skip
        assert front.ask(path, BODIES[path] | fields)[0] == 200
        assert fake.sampling[-1] == fields

    def test_null_is_the_default(self, front, fake):
        fields = {"temperature": None, "stop": None, "stream": None, "stream_options": None, "logprobs": None}
        assert front.ask("/v1/completions", PROMPT | fields)[0] == 200
        assert fake.sampling[-1] == {}

    def test_chat_without_max_tokens_is_unlimited(self, front, fake):
        assert front.ask("/v1/chat/completions", CHAT)[0] == 200
        assert fake.sampling[-1] == {"max_tokens": None}
        assert front.ask("/v1/chat/completions", CHAT | {"max_completion_tokens": 9})[0] == 200
        assert fake.sampling[-1] == {"max_tokens": 9}

    def test_max_tokens_and_max_completion_tokens_may_be_equal(self, front, fake):
        assert front.ask("/v1/chat/completions", CHAT | {"max_tokens": 9, "max_completion_tokens": 9})[0] == 200
        assert fake.sampling[-1] == {"max_tokens": 9}

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [False, False]),
            ({"continuous_usage_stats": False}, [False, False]),
            ({"include_usage": True, "continuous_usage_stats": False}, [None, None, (7, 4, 11)]),
            ({"include_usage": True, "continuous_usage_stats": True}, [(7, 2, 9), (7, 4, 11), (7, 4, 11)]),
        ],
    )
    def test_usage_in_the_last_or_every_chunk(self, front, path, options, expected):
        """`False` in `expected` means that a chunk has no usage."""
        chunks = front.events(path, BODIES[path] | {"stream": True, "stream_options": options})
        assert [(usage := chunk.get("usage", False)) and tuple(usage.values()) for chunk in chunks] == expected

    def test_continuous_usage_is_counted_per_choice(self, front):
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = PROMPT | {"prompt": ["a", "b"], "stream": True, "stream_options": options}
        *chunks, last = front.events("/v1/completions", asked)
        for index in range(2):
            own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [tuple(usage.values()) for usage in own] == [(7, 2, 9), (7, 4, 11)]
        assert tuple(last["usage"].values()) == (14, 8, 22)

    def test_messages_are_rendered_by_the_server(self, front, fake):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        assert front.ask("/v1/chat/completions", CHAT | {"messages": messages})[0] == 200
        sent = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}]
        assert json.loads(fake.requests[-1]["messages"]) == sent

    @pytest.mark.parametrize("path", BODIES)
    def test_ignored_fields_are_not_passed_on(self, front, fake, path):
        front.ask(path, BODIES[path])
        fields = {
            "user": "me", "safety_identifier": "x", "prompt_cache_key": "y", "metadata": {"a": "b"}, "store": False,
            "service_tier": "auto", "response_format": {"type": "text"},
        }  # fmt: skip
        assert front.ask(path, BODIES[path] | fields)[0] == 200
        assert fake.sampling[-1] == fake.sampling[-2]

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize(("reason", "expected"), [("timeout", ("length", "timeout")), ("length", ("length", None))])
    def test_timeout_finish_reason_is_length(self, front, says, path, reason, expected, stream):
        with says(say=["a"], reason=reason):
            body = BODIES[path] | {"stream": stream}
            choice = (front.events(path, body)[-1] if stream else front.ask(path, body)[1])["choices"][0]
        assert (choice["finish_reason"], choice.get("stop_reason")) == expected

    def test_response_id_is_the_engine_request_id(self, front, fake):
        status, body = front.ask("/v1/completions", PROMPT)
        assert (status, body["id"]) == (200, fake.requests[-1]["request_id"])

    @pytest.mark.parametrize("stream", [False, True])
    def test_x_request_id_is_passed_on(self, front, fake, stream):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.with_raw_response.create(
            **PROMPT, stream=stream, extra_headers={"X-Request-Id": "mine-1.a:b"}
        )
        assert answer.headers["X-Request-Id"] == "cmpl-mine-1.a:b"
        assert len(list(answer.parse())) > 0
        assert fake.requests[-1]["request_id"] == "cmpl-mine-1.a:b"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00fc"])
    def test_unsafe_x_request_id_is_rejected(self, front, given):
        status, body = front.ask("/v1/completions", PROMPT, {"X-Request-Id": given.encode().decode("latin-1")})
        assert (status, error_of(status, body)["message"].split(":")[0]) == (400, "X-Request-Id")

    @pytest.mark.parametrize(
        ("path", "field", "value"),
        [
            ("/v1/completions", "suffix", ""),
            ("/v1/chat/completions", "functions", [{"name": "f"}]),
            ("/v1/chat/completions", "function_call", "auto"),
            ("/v1/chat/completions", "reasoning_effort", "none"),
        ],
    )
    def test_unsupported_fields_are_rejected(self, front, path, field, value):
        status, body = front.ask(path, BODIES[path] | {field: value})
        error = error_of(status, body)
        assert (status, error["param"]) == (400, field)
        assert error["message"] == f"{field}={json.dumps(value)}: not supported; leave it out"

    @pytest.mark.parametrize(
        ("path", "fields", "named"),
        [
            ("/v1/completions", {"temprature": 1}, "temprature"),
            ("/v1/completions", {"x" * 3000: 1}, "x" * 77 + "..."),
            ("/v1/completions", {"messages": []}, "messages"),
            ("/v1/completions", {"max_completion_tokens": 1}, "max_completion_tokens"),
            ("/v1/completions", {"prompt": None}, "prompt"),
            ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
            ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
            ("/v1/completions", {"prompt": [2**31]}, "prompt"),
            ("/v1/completions", {"logit_bias": [1]}, "logit_bias"),
            ("/v1/completions", {"max_tokens": "3"}, "max_tokens"),
            ("/v1/completions", {"max_tokens": 1.5}, "max_tokens"),
            ("/v1/completions", {"temperature": True}, "temperature"),
            ("/v1/completions", {"temperature": math.inf}, "temperature"),
            ("/v1/completions", {"stop": [1]}, "stop"),
            ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
            ("/v1/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
            (
                "/v1/completions",
                {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                "stream_options.continuous_usage_stats",
            ),
            ("/v1/completions", {"lora_name": "fr"}, "lora_name"),
            ("/v1/completions", {"logprobs": True}, "logprobs"),
            ("/v1/completions", {"logprobs": 1, "echo": True, "stream": True}, "echo"),
            ("/v1/completions", {"logprobs": 1, "echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
            ("/v1/chat/completions", {"echo": True}, "echo"),
            ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
            ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
            ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
            ("/v1/chat/completions", {"messages": "x"}, "messages"),
            ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
            ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "x": "y"}]}, "messages.0.x"),
            ("/v1/completions", {"store": True}, "store"),
            ("/v1/completions", {"service_tier": "flex"}, "service_tier"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "messages.0.content",
            ),
        ],
    )
    def test_unknown_fields_and_wrong_types_are_rejected(self, front, path, fields, named):
        sent = json.dumps(BODIES[path] | fields).replace("Infinity", "1e999")
        status, body = front.ask(path, sent.encode())
        error = error_of(status, body)
        assert (status, error["param"]) == (400, named)
        assert error["message"].startswith(named)

    def test_missing_field_is_named(self, front):
        status, body = front.ask("/v1/completions", {"model": "paged_llm"})
        assert (status, error_of(status, body)["message"]) == (400, "prompt: is missing")

    @pytest.mark.parametrize(
        "body", [b"", b"{", b"[1]", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}', b"[" * 4000]
    )
    def test_body_must_be_a_json_object(self, front, body):
        status, answer = front.ask("/v1/completions", body)
        assert status == 400
        assert "JSON" in error_of(status, answer)["message"]

    @pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
    @pytest.mark.parametrize(
        "said",
        [
            'INVALID_ARGUMENT: lora_name="gpt": LoRA feature is not enabled.',
            "LoRA gpt is not supported, we currently support ['fr']",
        ],
    )
    def test_unknown_model_is_not_found(self, front, says, path, said):
        body = BODIES.get(path) or {"input": "x"}
        with says(say=[], fail=said):
            status, body = front.ask(path, body | {"model": "gpt"})
        error = error_of(status, body)
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "gpt" in error["message"]

    @pytest.mark.parametrize("path", BODIES)
    def test_model_name_selects_an_adapter(self, front, fake, path):
        status, body = front.ask(path, BODIES[path] | {"model": "fr"})
        assert (status, body["model"], fake.sampling[-1]["lora_name"]) == (200, "fr", "fr")

    def test_adapters_are_listed_as_models(self, front, fake):
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
    def test_model_name_may_contain_a_slash(self, front, fake, path):
        fake.adapters = json.dumps([{"name": "owner/fr", "rank": 8, "resident": True, "error": None}])
        assert front.ask(f"/v1/models/{path}")[1]["id"] == "owner/fr"

    @pytest.mark.parametrize(("path", "status"), [("/v1/none", 404), ("/v1/models/gpt", 404), ("/v1/completions", 405)])
    def test_unknown_path_or_method(self, front, path, status):
        assert front.ask(path)[0] == status
        error_of(status, front.ask(path)[1])

    @pytest.mark.parametrize(
        ("path", "status"),
        [("/live", 200), ("/health", 503), ("/metrics", 200), ("/v1/models", 200), ("/v1/models/paged_llm", 200)],
    )
    def test_head_requests(self, front, fake, path, status):
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
    def test_invalid_headers_are_rejected_without_the_body(self, front, headers, status, message):
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT)
        connection.request("POST", "/v1/completions", b"", headers)
        reply = connection.getresponse()
        assert (reply.status, error_of(status, json.load(reply))["message"][: len(message)]) == (status, message)
        connection.close()

    @pytest.mark.parametrize("declared", [True, False])
    def test_oversized_body_is_rejected(self, front, declared):
        """Its size is declared in a header, or it is chunked."""
        fits = json.dumps(PROMPT).encode().ljust(4096)
        assert front.ask("/v1/completions", fits)[0] == 200
        body = fits + b" "
        status, answer = front.ask("/v1/completions", body) if declared else chunked(front, body)
        assert (status, error_of(status, answer)["code"]) == (413, "request_too_large")
        assert answer["error"]["message"].endswith("exceeds the limit of 4096 bytes (--max-request-bytes)")


REQUESTS = {
    "/v1/completions": (CompletionRequest, PROMPT),
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/embeddings": (EmbeddingRequest, {"model": "paged_llm", "input": "x"}),
}
CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
# Each field at the top, and what is in the fields of models; of the latter the place is a key or an index.
PLACES = [
    (path, (name,)) for path, (kind, _) in REQUESTS.items() for name in [*kind.model_fields, *kind.unsupported_fields]
]
PLACES += [("/v1/completions", ())]
PLACES += [
    ("/v1/chat/completions", place)
    for place in [
        ("messages", 0), ("messages", 0, "content"), ("messages", 0, "content", 0), ("messages", 0, "name"),
        ("messages", 0, "tool_calls"), ("messages", 0, "tool_calls", 0), ("messages", 0, "tool_calls", 0, "function"),
        ("tools", 0), ("tools", 0, "function"), ("tool_choice", "function"), ("stream_options", "include_usage"),
        ("response_format", "json_schema"),
    ]
]  # fmt: skip
FULL = CHAT | {
    "messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream_options": {},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x"}},
}


class TestCostOfRefusals:
    """A body of megabytes may have millions of invalid elements, of which one is reported."""

    @pytest.mark.parametrize(("path", "place"), PLACES, ids=str)
    def test_number_of_validation_errors_is_bounded(self, path, place):
        for wrong in (0, None, "x", [], [0], ["x"], {}, {"x": 0}):
            for sent in ([wrong] * 1000, ["x"] * 999 + [wrong], [0] * 999 + [wrong], entries(wrong)):
                kind, body = REQUESTS[path]
                rejection = refused_body(kind, put(FULL if len(place) > 1 else body, place, sent))
                assert rejection is None or len(rejection.message) < 500
                found = rejection and rejection.__context__
                assert not isinstance(found, ValidationError) or found.error_count() < 100

    @pytest.mark.parametrize("value", [["x"] * 10**5, [[]] * 10**5, {str(i): i for i in range(10**5)}], ids=type)
    def test_long_values_are_not_encoded_fully(self, value):
        body = json.dumps(PROMPT | {"max_tokens": value}).encode()
        tracemalloc.start()
        try:
            from_json(body)
            needed = tracemalloc.get_traced_memory()[1]
            tracemalloc.reset_peak()
            with pytest.raises(ApiError) as caught:
                parse(CompletionRequest, body)
            assert tracemalloc.get_traced_memory()[1] < needed + len(body) / 2
        finally:
            tracemalloc.stop()
        assert caught.value.message == f"max_tokens={json.dumps(value)[:77]}...: Input should be a valid integer"


def refused_body(kind, body):
    """Return the error of a body, or None if it is valid."""
    try:
        parse(kind, json.dumps(body).encode())
    except ApiError as error:
        return error


def entries(value):
    return {str(index): value for index in range(1000)}


def put(body, place, value):
    """Return a copy of a body with a value at a place or, without a place, with the fields of the value."""
    if not place:
        return {**value, **body} if isinstance(value, dict) else value
    key, *rest = place
    changed = body[key] if rest else None
    copied = list(body) if isinstance(body, list) else dict(body)
    copied[key] = put(changed, rest, value) if rest else value
    return copied


def chunked(front, body):
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WAIT)
    connection.request("POST", "/v1/completions", iter([body[:2000], body[2000:]]), encode_chunked=True)
    reply = connection.getresponse()
    answer = reply.status, json.load(reply)
    connection.close()
    return answer


def echo(inputs):
    """Return each prompt as output, one character per delta. The prompt `fail` fails."""
    text = inputs.get("text_input") or str(inputs["input_ids"])
    return {"say": [], "fail": "INVALID_ARGUMENT: text_input: no"} if text == "fail" else {"say": list(text)}


class TestPrompts:
    """Requests with several prompts."""

    def test_too_many_prompts_are_rejected(self, front):
        status, body = front.ask("/v1/completions", PROMPT | {"prompt": ["a"] * 3})
        assert (status, len(body["choices"])) == (200, 3)
        for prompts in (["a"] * 4, [[1]] * 4):
            status, body = front.ask("/v1/completions", PROMPT | {"prompt": prompts})
            assert (status, error_of(status, body)["param"]) == (400, "prompt")
            assert body["error"]["message"] == "prompt: has 4 prompts; must be at most 3 (--max-prompts)"

    @pytest.mark.parametrize(
        ("prompt", "texts"),
        [
            (["ab", "cd", "e"], ["ab", "cd", "e"]),
            (["ab"], ["ab"]),
            ([5, 6], ["[5, 6]"]),
            ([[5], [6, 7]], ["[5]", "[6, 7]"]),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_each_prompt_has_its_choice(self, front, fake, prompt, texts, stream):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with respond_with(fake, echo):
            asked = {"stream_options": {"include_usage": True}} if stream else {}
            answer = client.completions.create(model="paged_llm", prompt=prompt, stream=stream, **asked)
            chunks = list(answer) if stream else [answer]
        expected = dict.fromkeys(range(len(texts)), "")
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            expected[choice.index] += choice.text
        assert list(expected.values()) == texts
        assert chunks[-1].usage.prompt_tokens == 7 * len(texts)
        assert chunks[-1].usage.completion_tokens == sum(2 * len(text) for text in texts)

    @pytest.mark.parametrize("stream", [False, True])
    def test_rejected_prompt_is_named_and_cancels_the_others(self, front, fake, stream):
        def hold(inputs):
            return echo(inputs) if inputs["text_input"] == "fail" else {"say": [], "hold": True}

        fake.left.clear()
        with respond_with(fake, hold):
            status, body = front.ask("/v1/completions", PROMPT | {"prompt": ["a", "fail"], "stream": stream})
        assert (status, error_of(status, body)["param"]) == (400, "prompt.1")
        assert fake.left.wait(WAIT), "the other goes on"


class TestEngineErrors:
    @pytest.mark.parametrize(
        ("said", "status", "message", "param"),
        [
            ("INVALID_ARGUMENT: top_p=2.0: must be at most 1", 400, "top_p=2.0: must be at most 1", "top_p"),
            ("INVALID_ARGUMENT: prompt_tokens=9: must be 1..8", 400, "prompt: prompt_tokens=9: must be 1..8", "prompt"),
            ("UNAVAILABLE: the engine has stopped", 503, "the engine has stopped", None),
            ("DEADLINE_EXCEEDED: the time limit passed", 504, "the time limit passed", None),
            ("CANCELLED: the request was cancelled", 499, "the request was cancelled", None),
            ("INTERNAL: KeyError: 1", 500, "KeyError: 1", None),
            ("Triton's own words", 500, "Triton's own words", None),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_error_classes_have_http_statuses(self, front, says, said, status, message, param, stream):
        with says(say=[], fail=said):
            got, body = front.ask("/v1/completions", PROMPT | {"stream": stream})
        error = error_of(got, body)
        assert (got, error["message"], error["param"]) == (status, message, param)

    @pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
    def test_cancelled_request_is_not_retried(self, front, says, fake, path):
        fake.requests.clear()
        body = BODIES.get(path) or {"model": "paged_llm", "input": "x"}
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=2)
        with (
            says(say=[], fail="CANCELLED: the request was cancelled"),
            pytest.raises(openai.APIStatusError) as raised,
        ):
            client.post(path.removeprefix("/v1"), body=body, cast_to=object)
        assert raised.value.status_code == 499
        assert error_of(499, {"error": raised.value.body})["code"] == "cancelled"
        assert len(fake.requests) == 1

    def test_errors_name_the_field_of_the_request(self, front, says):
        with says(say=[], fail="INVALID_ARGUMENT: max_tokens=0: must be 1..8"):
            _, body = front.ask("/v1/chat/completions", CHAT | {"max_completion_tokens": 0})
        assert body["error"]["param"] == "max_completion_tokens"
        assert body["error"]["message"] == "max_completion_tokens: max_tokens=0: must be 1..8"

    @pytest.mark.parametrize(
        ("end", "message"),
        [({"fail": "INTERNAL: out of luck"}, "out of luck"), ({"cut": True}, "the stream ended before the output was")],
    )
    def test_error_after_the_first_chunk_is_an_event(self, front, says, end, message):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with says(say=["a"], **end), client.completions.create(**PROMPT, stream=True) as stream:
            assert next(stream).choices[0].text == "a"
            with pytest.raises(openai.APIError) as raised:
                next(stream)
        assert error_of(500, {"error": raised.value.body})["message"].startswith(message)

    def test_no_server_is_unavailable(self):
        with gateway("localhost:1") as front:
            assert front.ask("/v1/completions", PROMPT)[0] == 503
            status, body = front.ask("/health")
            assert (status, error_of(status, body)["code"]) == (503, "unavailable")


@pytest.fixture(scope="module")
def locked(fake):
    with gateway(fake.url, "--api-key", "one", "--api-key", "two") as made:
        yield made


class TestKeys:
    @pytest.mark.parametrize("key", ["one", "two", "  one"])
    def test_valid_key_is_accepted(self, locked, key):
        assert locked.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200

    @pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}])
    @pytest.mark.parametrize("path", ["/v1/models", *BODIES])
    def test_invalid_key_is_rejected(self, locked, path, headers):
        status, body = locked.ask(path, BODIES.get(path), headers)
        assert (status, error_of(status, body)["code"]) == (401, "invalid_api_key")

    def test_keys_from_file_and_environment(self, tmp_path, fake, monkeypatch):
        file = tmp_path / "keys"
        file.write_text("of-a-file\n\n  spaced  \n")
        monkeypatch.setenv(keys.VARIABLE, "first, second")
        with gateway(fake.url, "--api-key", "one", "--api-key-file", str(file)) as front:
            for key in ("one", "of-a-file", "spaced", "first", "second"):
                assert front.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
            for key in ("", "first, second", "of-a-fil"):
                assert front.ask("/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 401

    @pytest.mark.parametrize(
        ("flags", "variable", "text", "reason"),
        [
            ((), "", None, "No such file"),
            ((), "", " \n\n", "has no key"),
            ((), " , ", "a", f"{keys.VARIABLE}: has no key"),
            (("",), "", "a", "--api-key: is empty"),
        ],
    )
    def test_key_source_without_keys_is_rejected(self, tmp_path, flags, variable, text, reason):
        if text is not None:
            (tmp_path / "keys").write_text(text)
        with pytest.raises(ValueError, match=reason):
            keys.collect(flags, tmp_path / "keys", {keys.VARIABLE: variable})

    def test_no_keys(self):
        assert keys.collect((), None, {keys.VARIABLE: ""}) == ()

    def test_metrics_and_health_need_no_key(self, locked, fake):
        fake.maps = ["UNAVAILABLE: not yet"]
        assert locked.metrics()["paged_openai_open_streams"] == 0
        assert locked.ask("/health")[0] == 503


class TestLeaving:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("said", [[], ["a"]])
    def test_disconnect_cancels_the_request(self, front, fake, says, stream, said):
        """Before and after the first delta, with streaming and without."""
        fake.asked.clear()
        fake.left.clear()
        body = json.dumps(PROMPT | {"stream": stream}).encode()
        with says(say=said, hold=True), socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert fake.asked.wait(WAIT)
            if stream and said:
                assert connection.recv(1), "the stream has begun"
            connection.close()
            assert fake.left.wait(WAIT), "the server never heard of it"

    def test_disconnect_before_the_body_is_counted(self, fake):
        with gateway(fake.url) as front:
            with socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            gone = 'paged_openai_requests_total{route="/v1/completions",status="499"}'
            until(lambda: front.metrics().get(gone) == 1, "the count of the request")


def test_ctrl_c_finishes_open_streams_and_rejects_new_ones(fake, says):
    fake.left.clear()
    with gateway(fake.url) as front, says(say=["a"], hold=True):
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        with client.completions.create(**PROMPT, stream=True) as stream:
            assert next(stream).choices[0].text == "a"
            front.process.send_signal(signal.SIGINT)
            until(lambda: refused(front.port), "the end of new connections")
            assert not fake.left.is_set()
            fake.left.set()  # the fake server ends the stream
            with pytest.raises(openai.APIError, match="the stream ended"):
                next(stream)
        assert front.process.wait(WAIT) == 130


def refused(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) != 0


def test_model_option(fake):
    with gateway(fake.url, "--model", "other") as front:
        for answer in (front.ask("/v1/completions", PROMPT | {"model": "other"}), front.ask("/v1/models")):
            assert answer[0] == 503, "the fake server has no such model"
            assert "unknown model: 'other'" in error_of(*answer)["message"]


def test_requests_are_counted_by_route_and_status(fake):
    with gateway(fake.url) as front:
        front.ask("/v1/completions", PROMPT)
        front.ask("/v1/completions", PROMPT)
        front.ask("/v1/completions", {})
        front.ask("/v1/models/paged_llm")
        front.ask("/made/up")
        counted = {name: value for name, value in front.metrics().items() if "requests_total" in name}
    assert counted == {
        'paged_openai_requests_total{route="/v1/completions",status="200"}': 2,
        'paged_openai_requests_total{route="/v1/completions",status="400"}': 1,
        'paged_openai_requests_total{route="/v1/models/{name}",status="200"}': 1,
        'paged_openai_requests_total{route="other",status="404"}': 1,
    }


TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"


ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def write_tokenizer(directory, template=TEMPLATE):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "<user>": 3, "<assistant>": 4}, "<unk>"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")
    made.chat_template = template
    made.save_pretrained(directory)
    return directory


class TestOwnTemplate:
    def test_prompt_is_rendered_in_the_gateway(self, tmp_path, fake):
        directory = write_tokenizer(tmp_path / "tokenizer")
        with (
            (tmp_path / "log").open("w") as errors,
            gateway(fake.url, "--tokenizer", str(directory), errors=errors) as front,
        ):
            assert front.ask("/v1/chat/completions", CHAT | {"max_tokens": 3})[0] == 200
        assert (tmp_path / "log").read_text().startswith(f"loading the tokenizer {directory} ...\n")
        assert fake.requests[-1]["text_input"] == "<s><user> x <assistant>"
        assert fake.sampling[-1] == {"max_tokens": 3, "add_special_tokens": False}
        assert "messages" not in fake.requests[-1]

    def test_tools_are_passed_to_the_template(self, tmp_path, fake):
        template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        tools = [{"type": "function", "function": {"name": "now"}}]
        with gateway(fake.url, "--tokenizer", str(write_tokenizer(tmp_path, template))) as front:
            assert front.ask("/v1/chat/completions", CHAT | {"tools": tools})[0] == 200
        assert fake.requests[-1]["text_input"] == "[now]"
        assert "tools" not in fake.requests[-1]

    def test_template_errors_are_invalid_requests(self, tmp_path, fake):
        picky = TEMPLATE + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        with gateway(fake.url, "--tokenizer", str(write_tokenizer(tmp_path, picky))) as front:
            status, body = front.ask("/v1/chat/completions", CHAT)
        error = error_of(status, body)
        assert (status, error["param"]) == (400, "messages")
        assert "no x" in error["message"]

    def test_template_timeout(self, tmp_path, fake):
        """Other requests are answered in the meantime."""
        slow = "{% if messages[0].content == 'y' %}" + ENDLESS + "{% endif %}" + TEMPLATE
        flags = ("--tokenizer", str(write_tokenizer(tmp_path, slow)), "--chat-template-timeout", "2")
        endless = CHAT | {"messages": [{"role": "user", "content": "y"}]}
        with gateway(fake.url, *flags) as front, ThreadPoolExecutor() as pool:
            asked = [pool.submit(front.ask, "/v1/chat/completions", endless) for _ in range(3)]
            assert front.ask("/v1/chat/completions", CHAT)[0] == 200
            for status, body in (one.result(WAIT) for one in asked):
                error = error_of(status, body)
                assert (status, error["param"]) == (400, "messages")
                reason = "messages: the chat template does not end within 2 s on them (--chat-template-timeout)"
                assert error["message"] == reason

    def test_tokenizer_without_template_is_rejected(self, tmp_path, capsys):
        directory = write_tokenizer(tmp_path, None)
        assert cli.main(["openai", "--tokenizer", str(directory)]) == 2
        assert "no chat template" in capsys.readouterr().err


class TestCommand:
    def test_connections_use_tcp_nodelay(self):
        with command.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), WAIT):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_port_in_use_is_rejected(self, front, capsys):
        assert cli.main(["openai", "--port", str(front.port)]) == 2
        assert f"--port {front.port}" in capsys.readouterr().err

    @pytest.mark.parametrize("value", ["0", "-1", "x"])
    def test_limits_must_be_positive(self, value, capsys):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["openai", f"--max-request-bytes={value}"])
        assert "must be a whole number, at least 1" in capsys.readouterr().err

    def test_url_with_scheme_is_rejected(self, capsys):
        assert cli.main(["openai", "--url", "http://localhost:8000"]) == 2
        assert "HOST:PORT" in capsys.readouterr().err

    def test_directory_without_tokenizer_is_rejected(self, tmp_path, capsys):
        assert cli.main(["openai", "--tokenizer", str(tmp_path)]) == 2
        assert f"--tokenizer {tmp_path}" in capsys.readouterr().err
