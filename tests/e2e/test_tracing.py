"""Traces across processes: the parents that clients, the gateway and the server itself give."""

import json
import urllib.request

import pytest

from paged_client import Client
from paged_client.probe import probe
from paged_client.serving.tritonserver import TritonServer
from tests.support.gateway import gateway
from tests.support.otlp import otlp_receiver
from tests.support.triton import post

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def receiver():
    with otlp_receiver() as made:
        yield made


@pytest.fixture
def traced(tiny, receiver, monkeypatch):
    """A server that traces every request."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, "otlp_traces_endpoint": receiver.endpoint}
    with TritonServer(tiny[0], options, engine_only=True) as server:
        yield server


def test_clients_and_the_gateway_pass_the_parent_on(traced, receiver):
    """A probe is not traced: the first span is of the request after it."""
    for index, protocol in enumerate(("grpc", "http")):
        with Client(getattr(traced, f"{protocol}_url"), protocol=protocol) as client:
            probe(client, None)
            client.generate("Once", max_tokens=2, traceparent=TRACEPARENT)
        root, phases = receiver.request(index)
        assert (root.trace_id, root.parent_id, root.service) == (TRACE, TRACEPARENT.split("-")[2], "chat-backend")
        assert "prefill" in {phase.name for phase in phases}
    post(traced, {"text_input": "Once", "max_tokens": 2, "traceparent": TRACEPARENT})
    assert receiver.request(2)[0].trace_id == TRACE
    with gateway(traced.grpc_url) as openai:
        bodies = {
            "completions": {"prompt": "Once", "max_tokens": 2},
            "embeddings": {"input": "Once"},
        }
        for index, (route, body) in enumerate(bodies.items(), start=3):
            status, _ = openai.ask(f"/v1/{route}", {"model": "paged_llm"} | body, {"traceparent": TRACEPARENT})
            assert status == 200
            root, _ = receiver.request(index)
            assert root.trace_id == TRACE
            assert root.attributes["gen_ai.operation.name"] == ["text_completion", "embeddings"][index - 3]


def test_the_servers_own_trace_is_the_parent(tiny, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    options = {"dtype": "float32", "num_gpu_blocks_override": 64, "otlp_traces_endpoint": receiver.endpoint}
    flags = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={receiver.endpoint}"]
    trace = [f"--trace-config={flag}" for flag in flags]
    with TritonServer(tiny[0], options, engine_only=True, server_args=trace) as server:
        body = json.dumps({"text_input": "Once", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"http://{server.http_url}/v2/models/paged_llm/generate", body, {"traceparent": TRACEPARENT}
        )
        urllib.request.urlopen(request).read()
        root, _ = receiver.request()
        assert root.trace_id == TRACE
        assert root.parent_id != TRACEPARENT.split("-")[2]  # the parent is the server's own span
