"""Traces across processes: the parents that clients, the gateway and the server itself give."""

import json
import time
import urllib.request

import pytest

from paged_client import Client
from paged_client.probe import probe
from paged_client.serving.tritonserver import TritonServer
from tests.support.gateway import gateway
from tests.support.otlp import otlp_receiver
from tests.support.triton import post
from tests.support.waiting import until

PARENT = "b7ad6b7169203331"


def trace_id(number):
    return f"0af7651916cd43dd8448eb211c8031{number:02x}"


def traceparent(number):
    return f"00-{trace_id(number)}-{PARENT}-01"


def root_of(traces, number):
    """Wait for the span of the request that had the parent with this number."""
    until(lambda: trace_id(number) in [root.trace_id for root in traces.roots()], "the span of a request")
    (root,) = (root for root in traces.roots() if root.trace_id == trace_id(number))
    return root


def test_clients_and_the_gateway_pass_the_parent_on(adapted_server, traces):
    """A probe is not traced: every span is of a request with a parent."""
    started = time.time_ns()
    for number, protocol in enumerate(("grpc", "http")):
        with Client(getattr(adapted_server, f"{protocol}_url"), protocol=protocol) as client:
            probe(client, None)
            client.generate("Once", max_tokens=2, traceparent=traceparent(number))
        root = root_of(traces, number)
        assert (root.parent_id, root.service) == (PARENT, "chat-backend")
        assert "prefill" in {span.name for span in traces.spans if span.parent_id == root.span_id}
    post(adapted_server, {"text_input": "Once", "max_tokens": 2, "traceparent": traceparent(2)})
    root_of(traces, 2)
    with gateway(adapted_server.grpc_url) as openai:
        for number, route, operation, body in (
            (3, "completions", "text_completion", {"prompt": "Once", "max_tokens": 2}),
            (4, "embeddings", "embeddings", {"input": "Once"}),
        ):
            status, _ = openai.ask(f"/v1/{route}", {"model": "paged_llm"} | body, {"traceparent": traceparent(number)})
            assert status == 200
            assert root_of(traces, number).attributes["gen_ai.operation.name"] == operation
    assert {root.trace_id for root in traces.roots() if root.began >= started} == {trace_id(n) for n in range(5)}


@pytest.mark.nightly
def test_the_servers_own_trace_is_the_parent(tiny):
    with otlp_receiver() as receiver:
        options = {"dtype": "float32", "num_gpu_blocks_override": 64, "otlp_traces_endpoint": receiver.endpoint}
        flags = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={receiver.endpoint}"]
        more = {"server_args": [f"--trace-config={flag}" for flag in flags]}
        more["environment"] = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with TritonServer(tiny[0], options, engine_only=True, **more) as server:
            body = json.dumps({"text_input": "Once", "max_tokens": 2}).encode()
            request = urllib.request.Request(
                f"http://{server.http_url}/v2/models/paged_llm/generate", body, {"traceparent": traceparent(0)}
            )
            urllib.request.urlopen(request).read()
            root, _ = receiver.request()
    assert root.trace_id == trace_id(0)
    assert root.parent_id != PARENT  # the parent is the server's own span
