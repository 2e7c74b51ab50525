"""Traces of requests: a span per request and per phase, received over OTLP."""

import itertools
import json
import logging
import sys
import time
from importlib.util import find_spec

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.server import admission
from paged_backend.server.service import Service
from paged_backend.server.streams import tracing
from paged_backend.server.streams.tracing import Tracing
from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.otlp import otlp_receiver
from tests.support.pb_utils import PB_UTILS
from tests.support.waiting import until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
# It comes first, with the newest packages; the other exporter is that of the packages of the server in the wheel.
HAS_PROTOBUF = bool(find_spec("opentelemetry.exporter.otlp") and find_spec("opentelemetry.exporter.otlp.proto"))


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds between two exports
    with otlp_receiver() as made:
        yield made


def ask(service, *, parameters=None, context=None, **inputs):
    """Send a request and return its responses. context: the trace context of the server."""
    caller = Caller(**inputs)
    caller.parameters = lambda: json.dumps(parameters or {})
    if context:
        caller.trace = lambda: type("Trace", (), {"get_context": lambda self: json.dumps(context)})()
    service.submit(caller)
    return caller


def test_a_request_has_a_span_for_each_phase(serve, receiver):
    service = serve(otlp_traces_endpoint=receiver.endpoint, max_num_batched_tokens=8, max_num_seqs=4)
    before = time.time_ns()
    sampling = json.dumps({"max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9, "stop": ["\0"]})
    ask(service, text_input="a" * 20, sampling_parameters=sampling).all()
    root, phases = receiver.request()
    assert [phase.name for phase in phases] == [
        *("receive", "tokenize", "queue", "prefill", "prefill", "prefill", "decode", "send")
    ]
    prefills = [phase.attributes for phase in phases if phase.name == "prefill"]
    assert [(one["paged_llm.first_token"], one["paged_llm.tokens"]) for one in prefills] == [(0, 8), (8, 8), (16, 4)]
    assert phases[-2].attributes == {"paged_llm.steps": 4}
    for one, after in itertools.pairwise(phases):
        assert one.began <= one.ended <= after.ended <= root.ended
    assert before - 10**9 < root.began == phases[0].began
    assert (root.name, root.service, root.parent_id, root.failed) == ("text_completion tiny", "paged_llm", "", False)
    assert receiver.content_types == {"application/x-protobuf" if HAS_PROTOBUF else "application/json"}
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paged_llm",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.stop_sequences": ["\0"],
        "gen_ai.request.stream": False,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert {name: root.attributes.get(name) for name in expected} == expected


@pytest.mark.parametrize("source", ["parameter", "server"])
def test_the_parent_is_that_of_the_server_or_the_parameter(serve, receiver, source):
    """The server's own span takes precedence."""
    service = serve(otlp_traces_endpoint=receiver.endpoint)
    other = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    parameters = {"traceparent": TRACEPARENT if source == "parameter" else other, "max_tokens": 1}
    context = {"traceparent": TRACEPARENT} if source == "server" else None
    ask(service, text_input="a", parameters=parameters, context=context).all()
    root, phases = receiver.request()
    assert (root.trace_id, root.parent_id) == (TRACE, PARENT)
    assert {phase.trace_id for phase in phases} == {TRACE}


def test_sampling(serve, receiver):
    """Without a parent the ratio decides, with one the parent. An invalid parent is ignored."""
    service = serve(otlp_traces_endpoint=receiver.endpoint, trace_sample_ratio=0.0)
    contexts = ("00-nonsense", TRACEPARENT[:-2] + "00", None, TRACEPARENT)
    for context in contexts:
        parameters = {"max_tokens": 1} | ({"traceparent": context} if context else {})
        ask(service, text_input="a", parameters=parameters).all()
    root, _ = receiver.request()
    assert root.trace_id == TRACE
    assert len(receiver.roots()) == 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_is_a_phase(serve, receiver, mode):
    service = serve(
        otlp_traces_endpoint=receiver.endpoint,
        preemption_mode=mode,
        num_gpu_blocks_override=12,
        block_size=4,
        swap_space="1MiB" if mode == "swap" else 0,
        enable_prefix_caching=False,
    )
    asked = [
        ask(service, text_input="abcdefgh"[n:] * 2, sampling_parameters='{"max_tokens": 30, "ignore_eos": true}')
        for n in range(3)
    ]
    for one in asked:
        one.all()
    names = [phase for index in range(3) for phase in receiver.request(index)[1]]
    preempted = [phase for phase in names if phase.name == "preempted"]
    assert preempted and {phase.attributes["paged_llm.kind"] for phase in preempted} == {mode}
    moves = [phase for phase in names if phase.name in ("swap_out", "swap_in")]
    if mode == "swap":
        assert {phase.name for phase in moves} == {"swap_out", "swap_in"}
        assert all(phase.attributes["paged_llm.blocks"] > 0 for phase in moves)
    else:
        assert moves == []


def test_a_failed_request_has_an_error(serve, receiver):
    service = serve(otlp_traces_endpoint=receiver.endpoint)
    sampling = json.dumps({"max_tokens": 4, "regex": "("})
    _, error, final = ask(service, text_input="a", sampling_parameters=sampling).get(timeout=WAIT)
    assert error and final
    root, _ = receiver.request()
    assert root.failed
    assert root.attributes["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("inputs", "operation"),
    [
        ({"messages": '[{"role": "user", "content": "a"}]', "sampling_parameters": '{"max_tokens": 1}'}, "chat"),
        ({"embedding_request": '{"input": "abc"}'}, "embeddings"),
        ({"text_input": "a" * 30, "sampling_parameters": '{"max_tokens": 1}'}, "text_completion"),
    ],
    ids=["chat", "embeddings", "long prompt"],
)
def test_operations(serve, receiver, monkeypatch, inputs, operation):
    monkeypatch.setattr(admission, "SHORT_CHARS", 20)
    service = serve(otlp_traces_endpoint=receiver.endpoint)
    service._assembly.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
    _, error, _ = ask(service, **inputs).get(timeout=WAIT)
    assert error is None
    root, phases = receiver.request()
    assert root.name == f"{operation} tiny"
    assert {"receive", "tokenize", "queue", "prefill", "send"} <= {phase.name for phase in phases}


def test_without_an_endpoint_nothing_is_imported(serve):
    """No request pays for tracing that is off."""
    service = serve()
    assert service._tracing is None


def test_a_missing_package_fails_the_load(tiny, monkeypatch):
    for kind in ("proto", "json"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.{kind}.http.trace_exporter", None)
    config = EngineConfig.from_options(
        {"model": str(tiny[0]), "otlp_traces_endpoint": "http://localhost:4318/v1/traces"}
    )
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*paged-llm-triton\[tracing\]"):
        Service(config, PB_UTILS, {"model": "tiny"})


@pytest.fixture
def root_records():
    """The records that reach the root logger. caplog also takes those of loggers that do not propagate."""
    handler, records = logging.Handler(), []
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def test_messages_of_the_exporter_are_limited(root_records, monkeypatch):
    """A message is one short line with the first cause, and the next one has the number of those between."""
    Tracing("http://localhost:9/v1/traces", model="tiny").stop()
    exporter = logging.getLogger("opentelemetry.exporter.otlp")
    try:
        try:
            raise OSError("refused")
        except OSError as error:
            raise RuntimeError("told at length" * 30) from error
    except RuntimeError:
        exporter.exception("export failed\nafter %d s", 2)
        logging.getLogger("opentelemetry.sdk.trace.export").exception("Exception while exporting Span.")
    exporter.error("again")
    monkeypatch.setattr(tracing, "MESSAGE_SECONDS", 0.0)
    exporter.error("at last")
    found = [one for one in root_records if one.name.startswith("opentelemetry.")]
    texts = [one.getMessage() for one in found]
    assert texts == ["export failed after 2 s OSError: refused", "at last (2 earlier messages were left out)"]
    assert [one.exc_info for one in found] == [None, None]


def test_a_collector_that_is_down_is_reported(serve, root_records, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    service = serve(otlp_traces_endpoint="http://localhost:9/v1/traces")
    ask(service, text_input="a", parameters={"max_tokens": 1}).all()
    until(lambda: any(one.name.startswith("opentelemetry.exporter") for one in root_records), "the error")
