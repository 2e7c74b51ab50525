"""Fields of requests, and the cost of rejecting them."""

import json
import math
import tracemalloc
from dataclasses import fields

import pytest
from pydantic import ValidationError

from paged_backend.api.sampling_params import SamplingParams
from paged_client.openai import schema
from paged_client.openai.chat_schema import ChatRequest
from paged_client.openai.embeddings import EmbeddingRequest
from paged_client.openai.errors import ApiError
from paged_client.openai.schema import MAX_CONTAINERS, CompletionRequest, SamplingFields, parse, read_object, validate
from tests.support.gateway import BODIES, CHAT, PROMPT, error_of

# Sampling parameters that have a word of OpenAI's, and prefill_only, which the gateway sets itself.
OTHERWISE = {"logprobs", "echo", "lora_name", "prefill_only"}  # echo is for completions only


def test_sampling_fields_match_the_engine():
    """The client does not depend on the engine, so it has its own list of fields."""
    engines = {spec.name for spec in fields(SamplingParams)}
    assert SamplingFields.model_fields.keys() == engines - OTHERWISE


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
            for sent in ([wrong] * 200, ["x"] * 199 + [wrong], [0] * 199 + [wrong], entries(wrong)):
                kind, body = REQUESTS[path]
                rejection = refused_body(kind, put(FULL if len(place) > 1 else body, place, sent))
                assert rejection is None or len(rejection.message) < 500
                found = rejection and rejection.__context__
                assert not isinstance(found, ValidationError) or found.error_count() < 100

    @pytest.mark.parametrize("value", [["x"] * 10**5, [[]] * 10**5, {str(i): i for i in range(10**5)}], ids=type)
    def test_long_values_are_not_encoded_fully(self, value):
        body = json.dumps(PROMPT | {"max_tokens": value}).encode()
        values = read_object(body)
        tracemalloc.start()
        try:
            with pytest.raises(ApiError) as caught:
                validate(CompletionRequest, values)
            assert tracemalloc.get_traced_memory()[1] < len(body) / 2
        finally:
            tracemalloc.stop()
        assert caught.value.message == f"max_tokens={json.dumps(value)[:77]}...: Input should be a valid integer"


def refused_body(kind, body):
    """Return the error of a body, or None if it is valid."""
    try:
        parse(kind, json.dumps(body).encode())
    except ApiError as error:
        return error


@pytest.mark.parametrize(("levels", "allowed"), [(201, True), (202, False)])
def test_depth_of_a_body_is_limited(levels, allowed):
    value = []
    for _ in range(levels - 2):
        value = [value]
    rejection = refused_body(CompletionRequest, PROMPT | {"user": value})
    assert rejection is None if allowed else "not valid JSON: recursion limit exceeded" in rejection.message


def test_number_of_lists_of_a_body_is_limited():
    """Brackets in strings do not count, whatever they contain."""
    lists = [[]] * (MAX_CONTAINERS - 2)  # beside the outer one and the body
    assert refused_body(CompletionRequest, PROMPT | {"user": lists}) is None
    rejection = refused_body(CompletionRequest, PROMPT | {"user": [*lists, []]})
    assert rejection.message == f"the body has more than {MAX_CONTAINERS} lists and objects"
    text = '[{"' + '\\["{' * MAX_CONTAINERS
    assert refused_body(CompletionRequest, PROMPT | {"user": text}) is None


def test_a_string_without_an_end_is_scanned_once():
    """Scanned again from each of its quotes, this body would take weeks."""
    with pytest.raises(ApiError, match="lists and objects"):
        read_object(b"[" * (MAX_CONTAINERS + 1) + b'"' + b'\\"' * 5_000_000 + b"\\")


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"prompt": "x", "model": "m", "prompt": "y"}', "prompt"),
        (b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}', "5"),
    ],
)
def test_key_may_not_be_there_twice(body, key):
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, body)
    assert (caught.value.status, caught.value.message) == (
        400, f'the body is not valid JSON: the key "{key}" is there twice',
    )  # fmt: skip


def entries(value):
    return {str(index): value for index in range(200)}


def put(body, place, value):
    """Return a copy of a body with a value at a place or, without a place, with the fields of the value."""
    if not place:
        return {**value, **body} if isinstance(value, dict) else value
    key, *rest = place
    changed = body[key] if rest else None
    copied = list(body) if isinstance(body, list) else dict(body)
    copied[key] = put(changed, rest, value) if rest else value
    return copied


class TestRequests:
    @pytest.mark.parametrize(
        ("path", "field", "value"),
        [
            ("/v1/completions", "suffix", "x"),
            ("/v1/completions", "prompt_embeds", "x"),
            ("/v1/completions", "truncation_side", "right"),
            ("/v1/chat/completions", "chat_template", "{{ messages }}"),
            ("/v1/chat/completions", "functions", [{"name": "f"}]),
            ("/v1/chat/completions", "function_call", "auto"),
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
            ("/v1/completions", {"max_tokens": "1_0"}, "max_tokens"),
            ("/v1/completions", {"temperature": "nan"}, "temperature"),
            ("/v1/completions", {"ignore_eos": "maybe"}, "ignore_eos"),
            ("/v1/completions", {"stop_token_ids": [None]}, "stop_token_ids"),
            ("/v1/completions", {"prompt": None}, "prompt"),
            ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
            ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
            ("/v1/completions", {"prompt": [2**31]}, "prompt"),
            ("/v1/completions", {"logit_bias": [1]}, "logit_bias"),
            ("/v1/completions", {"max_tokens": "many"}, "max_tokens"),
            ("/v1/completions", {"max_tokens": 1.5}, "max_tokens"),
            ("/v1/completions", {"temperature": True}, "temperature"),
            ("/v1/completions", {"temperature": math.inf}, "temperature"),
            ("/v1/completions", {"stop": [1]}, "stop"),
            ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
            ("/v1/completions", {"logits_digest": True, "stream": True}, "logits_digest"),
            (
                "/v1/completions",
                {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                "stream_options.continuous_usage_stats",
            ),
            ("/v1/completions", {"logprobs": True}, "logprobs"),
            ("/v1/completions", {"logprobs": 1, "echo": True, "stream": True}, "echo"),
            ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
            ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
            ("/v1/chat/completions", {"messages": "x"}, "messages"),
            ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
            ("/v1/chat/completions", {"messages": [{"role": "<|im_end|>", "content": "x"}]}, "messages.0.role"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "function_call": {}}]}, "messages.0.function_call"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
                "messages.0.content.0",
            ),
        ],
    )
    def test_wrong_values_are_rejected(self, front, path, fields, named):
        sent = json.dumps(BODIES[path] | fields).replace("Infinity", "1e999")
        status, body = front.ask(path, sent.encode())
        error = error_of(status, body)
        assert (status, error["param"]) == (400, named)
        assert error["message"].startswith(named)

    @pytest.mark.parametrize(
        ("path", "fields", "message"),
        [
            (
                "/v1/chat/completions",
                {"use_beam_search": True},
                "use_beam_search=true: not supported; use beam_width instead",
            ),
            ("/v1/chat/completions", {"detokenize": False}, "detokenize=false: not supported; leave it out"),
            ("/v1/completions", {"lora_name": "fr"}, 'lora_name="fr": not supported; use model instead'),
        ],
    )
    def test_messages_name_the_field_to_use(self, front, path, fields, message):
        status, body = front.ask(path, BODIES[path] | fields)
        assert (status, error_of(status, body)["message"]) == (400, message)

    @pytest.mark.parametrize("path", BODIES)
    def test_unsupported_fields_without_effect_are_accepted(self, front, path):
        more = {"use_beam_search": False, "detokenize": True, "suffix": "", "truncation_side": "left"}
        assert front.ask(path, BODIES[path] | more)[0] == 200

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("temprature", "; did you mean temperature?"),
            ("num_beams", "; use beam_width instead"),
            ("frobnicate\n", ""),
        ],
    )
    def test_unknown_fields_are_ignored_with_one_warning(self, front, fake, caplog, monkeypatch, name, hint):
        monkeypatch.setattr(schema, "_warned", set())
        for _ in range(2):
            assert front.ask("/v1/completions", PROMPT | {name: 1})[0] == 200
        assert caplog.messages == [f"a request has the unknown field {name!r}, which is ignored{hint}"]
        assert fake.sampling[-1] == {}

    def test_number_and_length_of_warnings_are_bounded(self, front, caplog, monkeypatch):
        monkeypatch.setattr(schema, "_warned", set())
        body = {f"unknown{index}" + "x" * 3000: 1 for index in range(schema._MAX_WARNINGS + 9)} | PROMPT
        assert schema.parse(CompletionRequest, json.dumps(body).encode()).prompt == "x"
        assert len(caplog.messages) == schema._MAX_WARNINGS
        assert max(map(len, caplog.messages)) < 300

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize("value", [None, {"a": 1}], ids=["null", "object"])
    def test_fields_of_other_servers_are_ignored(self, front, fake, path, value):
        names = (
            "verbosity", "prediction", "keep_alive", "options", "chat_id", "store", "metadata", "service_tier", "user",
            "kv_transfer_params", "guided_decoding_backend", "web_search_options",
        )  # fmt: skip
        front.ask(path, BODIES[path])
        assert front.ask(path, BODIES[path] | dict.fromkeys(names, value))[0] == 200
        assert fake.sampling[-1] == fake.sampling[-2]

    @pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
    def test_model_is_optional(self, front, says, path):
        body = {"input": "x"} if path == "/v1/embeddings" else {**BODIES[path], "model": None}
        with says(say=["[1.0]"]):
            assert front.ask(path, body)[1]["model"] == "paged_llm"

    def test_numbers_and_flags_may_be_strings(self, front, fake):
        """Like in requests to the server."""
        given = {"max_tokens": "12", "temperature": "0.5", "top_k": 3.0, "ignore_eos": "true", "n": "1", "seed": "-1"}
        lists = {"stop_token_ids": [1, "2"], "logit_bias": {"5": "1.5"}}
        assert front.ask("/v1/completions", PROMPT | given | lists | {"logprobs": "2"})[0] == 200
        sent = fake.sampling[-1]
        values = {"max_tokens": 12, "temperature": 0.5, "top_k": 3, "ignore_eos": True, "n": 1, "seed": -1}
        assert {name: sent[name] for name in (*values, "logprobs", *lists)} == values | lists | {"logprobs": 2}
        assert sent["ignore_eos"] is True
        assert front.ask("/v1/chat/completions", CHAT | {"max_completion_tokens": "12"})[0] == 200
        assert fake.sampling[-1]["max_tokens"] == 12

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
