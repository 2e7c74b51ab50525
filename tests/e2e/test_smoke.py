"""`paged serve demo` in its default configuration, with what it prints. `make quick` runs this file."""

import json
import urllib.request

import numpy as np
import pytest

from paged_client import Client
from tests.support.triton import metrics, post, raw_stream
from tests.support.waiting import WAIT, until

PROMPT = "The capital of France is"


def test_it_prints_the_phases_of_its_start_and_a_summary(demo_server):
    lines = demo_server.errors.splitlines()
    for start in (
        "Loading weights: ",
        "Verifying: ",
        "Warming up: ",
        "Model: ",
        "Kernels: ",
        "Data types: ",
        "Context length: ",
        "KV cache: ",
        "Loaded in ",
    ):
        assert any(line.startswith(start) for line in lines), (start, demo_server.errors)
    assert not [line for line in lines if " INFO " in line or "progress:" in line]
    for address in (demo_server.http_url, demo_server.grpc_url, demo_server.metrics_url, demo_server.openai_url):
        assert address in demo_server.output


def test_requests_over_http_and_grpc_are_answered_and_counted(demo_server):
    before = metrics(demo_server)["paged_generation_tokens_total"]
    status, text = post(demo_server, {"text_input": PROMPT, "temperature": 0, "max_tokens": 4})
    assert status == 200, text
    whole = json.loads(text)["text_output"]
    assert "Paris" in whole
    with raw_stream(demo_server) as stream:
        sampling = {"temperature": 0, "max_tokens": 4}
        stream.send(text_input=PROMPT, stream=True, exclude_input_in_output=True, sampling_parameters=sampling)
        assert PROMPT + "".join(part.text or "" for part in stream.all()) == whole
    until(lambda: metrics(demo_server)["paged_generation_tokens_total"] == before + 8, "the metrics of both")


def test_an_openai_client_is_answered(demo_server):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": "paged_llm", "messages": messages, "temperature": 0})
    request = urllib.request.Request(
        f"http://{demo_server.openai_url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as reply:
        (choice,) = json.load(reply)["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"  # it ends by itself, without max_tokens


def test_embeddings_separate_topics(demo_server):
    with Client(demo_server.grpc_url) as client:
        near, other, far = (
            np.array(client.embed(text).values)
            for text in ("A cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose by half a point.")
        )
    assert near @ other > near @ far
    assert np.linalg.norm(far) == pytest.approx(1, abs=1e-5)
