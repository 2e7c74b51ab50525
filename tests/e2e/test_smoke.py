"""`paged serve demo` in its default configuration, with what it prints. `make quick` runs this file."""

import json
import signal
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from paged_client import Client
from paged_client.serving.ports import choose_ports
from paged_client.serving.server_files import REPOSITORY_ROOT
from tests.support.triton import metrics, post, raw_stream
from tests.support.waiting import WAIT

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def served(demo_model, tmp_path_factory):
    """The addresses of a server that `paged serve` runs, and what it has printed to standard error."""
    directory = tmp_path_factory.mktemp("served")
    names = ("http", "grpc", "metrics", "openai")
    ports = dict(zip(names, choose_ports(http=0, grpc=0, metrics=0, openai=0), strict=True))
    flags = [f"--{name}-port={port}" for name, port in ports.items()]
    with (directory / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "paged_client", "serve", "demo", *flags, f"--log-file={directory / 'log'}"],
            cwd=REPOSITORY_ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    printed = []
    try:
        while not printed or not printed[-1].startswith("Press Ctrl-C"):
            printed.append(process.stdout.readline())
            assert printed[-1], (directory / "errors").read_text()
        urls = {f"{name}_url": f"localhost:{port}" for name, port in ports.items()}
        yield SimpleNamespace(**urls, printed="".join(printed), errors=(directory / "errors").read_text())
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode == 0
    assert "Started GRPCInferenceService" in (directory / "log").read_text()


def test_it_prints_the_phases_of_its_start_and_a_summary(served):
    lines = served.errors.splitlines()
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
        assert any(line.startswith(start) for line in lines), (start, served.errors)
    assert not [line for line in lines if " INFO " in line or "progress:" in line]
    for address in (served.http_url, served.grpc_url, served.metrics_url, served.openai_url):
        assert address in served.printed


def test_requests_over_http_and_grpc_are_answered_and_counted(served):
    status, text = post(served, {"text_input": PROMPT, "temperature": 0, "max_tokens": 4})
    assert status == 200, text
    whole = json.loads(text)["text_output"]
    assert "Paris" in whole
    with raw_stream(served) as stream:
        sampling = {"temperature": 0, "max_tokens": 4}
        stream.send(text_input=PROMPT, stream=True, exclude_input_in_output=True, sampling_parameters=sampling)
        assert PROMPT + "".join(part.text or "" for part in stream.all()) == whole
    assert metrics(served)["paged_generation_tokens_total"] >= 8


def test_an_openai_client_is_answered(served):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": "paged_llm", "messages": messages, "temperature": 0, "max_tokens": 16})
    request = urllib.request.Request(
        f"http://{served.openai_url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT) as reply:
        assert "Paris" in json.load(reply)["choices"][0]["message"]["content"]


def test_embeddings_separate_topics(served):
    with Client(served.grpc_url) as client:
        near, other, far = (
            np.array(client.embed(text).values)
            for text in ("A cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose by half a point.")
        )
    assert near @ other > near @ far
    assert np.linalg.norm(far) == pytest.approx(1, abs=1e-5)
