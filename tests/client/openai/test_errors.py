"""Errors of the engine in OpenAI's form."""

import openai
import pytest

from tests.support.gateway import BODIES, CHAT, PROMPT, error_of, gateway


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
def test_error_classes_have_http_statuses(front, says, said, status, message, param, stream):
    with says(say=[], fail=said):
        got, body = front.ask("/v1/completions", PROMPT | {"stream": stream})
    error = error_of(got, body)
    assert (got, error["message"], error["param"]) == (status, message, param)


@pytest.mark.parametrize("path", BODIES)
def test_models_without_text_name_the_routes_to_use(front, says, path):
    reason = "this model classifies prompts and generates no text"
    with says(say=[], fail=f"INVALID_ARGUMENT: text_input: {reason}; use classification_request"):
        error = error_of(*front.ask(path, BODIES[path]))
    assert (error["message"], error["param"]) == (f"model: {reason}; use /classify, /score or /rerank", "model")


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
def test_cancelled_request_is_not_retried(front, says, fake, path):
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


def test_errors_name_the_field_of_the_request(front, says):
    with says(say=[], fail="INVALID_ARGUMENT: max_tokens=0: must be 1..8"):
        _, body = front.ask("/v1/chat/completions", CHAT | {"max_completion_tokens": 0})
    assert body["error"]["param"] == "max_completion_tokens"
    assert body["error"]["message"] == "max_completion_tokens: max_tokens=0: must be 1..8"


@pytest.mark.parametrize(
    "said",
    [
        "prompt_tokens=300: must be 1..255 (max_model_len is 256, and one token must be left to generate)",
        "max_tokens=200: must be 1..56 after a prompt of 200 tokens (max_model_len is 256)",
        "messages: 9000 characters; must be at most 800 (the most that a prompt within max_model_len=256 can have)",
    ],
)
def test_long_prompts_have_the_code_that_clients_look_for(front, says, said):
    with says(say=[], fail=f"INVALID_ARGUMENT: {said}"):
        status, body = front.ask("/v1/chat/completions", CHAT)
    error = error_of(status, body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].endswith(f"{said}. This model's maximum context length is 256 tokens.")


def test_no_server_is_unavailable():
    with gateway("localhost:1") as front:
        assert front.ask("/v1/completions", PROMPT)[0] == 503
        status, body = front.ask("/health")
        assert (status, error_of(status, body)["code"]) == (503, "unavailable")


@pytest.mark.parametrize("path", [*BODIES, "/v1/embeddings"])
@pytest.mark.parametrize(
    "said",
    [
        'INVALID_ARGUMENT: lora_name="gpt": LoRA feature is not enabled.',
        "LoRA gpt is not supported, we currently support ['fr']",
    ],
)
def test_unknown_model_is_not_found(front, says, path, said):
    body = BODIES.get(path) or {"input": "x"}
    with says(say=[], fail=said):
        status, body = front.ask(path, body | {"model": "gpt"})
    error = error_of(status, body)
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "gpt" in error["message"]
    assert "not enabled" not in error["message"]
