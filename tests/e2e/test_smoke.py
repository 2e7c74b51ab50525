"""The demo model in its default configuration on a plain tritonserver. `make quick` runs this file."""

import json
from pathlib import Path

import pytest

from tests.support.triton import metrics, plain_server, post, raw_stream

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def plain(demo_model):
    """The environment has only what the server of the wheel needs: no wrapper, and no variables of this project."""
    with plain_server(ROOT / "model_repository", without=ROOT) as running:
        yield running


def test_requests_over_http_and_grpc_are_answered_and_counted(plain):
    status, text = post(plain, {"text_input": PROMPT, "temperature": 0, "max_tokens": 4})
    assert status == 200, text
    whole = json.loads(text)["text_output"]
    assert "Paris" in whole
    with raw_stream(plain) as stream:
        sampling = {"temperature": 0, "max_tokens": 4}
        stream.send(text_input=PROMPT, stream=True, exclude_input_in_output=True, sampling_parameters=sampling)
        assert PROMPT + "".join(part.text or "" for part in stream.all()) == whole
    counted = metrics(plain)
    assert sum(counted[name] for name in counted if name.startswith("paged_requests_finished_total")) == 2
    assert counted["paged_generation_tokens_total"] == 8


def test_a_conversation_is_rendered_with_the_chat_template(plain):
    messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    status, text = post(plain, {"messages": messages, "temperature": 0, "max_tokens": 16})
    assert status == 200, text
    assert "Paris" in json.loads(text)["text_output"]
