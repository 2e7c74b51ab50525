"""The load generator and the server benchmarks, with real servers."""

import json
import os
from types import SimpleNamespace

import pytest

from paged_bench import _servers as bench
from paged_bench._engine import Job
from paged_bench._servers import AnalyzerError, LoadResult, TextWorkload, read_export, run_perf_analyzer
from paged_client import load
from paged_client.cli import main
from paged_client.types import PagedError
from tests.support.records import records_of
from tests.support.triton import MODEL, idle


def ask(**sampling):
    text = json.dumps({"temperature": 0, "ignore_eos": True} | sampling)
    return {"text_input": "One, two, three,", "stream": True, "sampling_parameters": text}


def test_every_request_is_answered_at_any_concurrency(server):
    asks = [ask(max_tokens=2 + index) for index in range(7)]
    answers = load.closed_loop(server.grpc_url, MODEL, asks, concurrency=3)
    assert len(answers) == 7
    for index, answer in enumerate(answers):
        assert 1 <= len(answer.stamps) <= 2 + index
        assert [answer.sent, *answer.stamps] == sorted([answer.sent, *answer.stamps])
    opened = sorted(answer.sent for answer in answers)
    ended = sorted(answer.stamps[-1] for answer in answers)
    assert all(begun > done for begun, done in zip(opened[3:], ended, strict=False)), "more than three were open"
    idle(server)


def test_requests_are_sent_on_schedule(server):
    arrivals = [0.0, 0.05, 0.3]
    answers = load.open_loop(server.grpc_url, MODEL, [ask(max_tokens=3)] * 3, arrivals)
    assert [one.sent - answers[0].sent for one in answers] == pytest.approx(arrivals)
    idle(server)


def test_a_rejected_request_stops_the_load(server):
    with pytest.raises(PagedError) as caught:
        load.closed_loop(server.grpc_url, MODEL, [ask(max_tokens=3), ask(max_tokens=0)], concurrency=2)
    assert caught.value.code == "INVALID_ARGUMENT"
    idle(server)


def test_a_perf_analyzer_export_is_parsed():
    """An export of two requests: three tokens in two responses, and two tokens in one."""
    requests = [
        {
            "timestamp": 5_000_000_000 + begun,
            "request_inputs": {"sampling_parameters": json.dumps({"max_tokens": tokens})},
            "response_timestamps": [5_000_000_000 + when for when in stamps],
        }
        for begun, tokens, stamps in ((0, 3, [100_000_000, 250_000_000]), (50_000_000, 2, [500_000_000]))
    ]
    found = read_export({"experiments": [{"requests": requests}]})
    assert (found.tokens, found.responses) == (5, 3)
    assert (found.seconds, *found.first, *found.between) == pytest.approx((0.5, 0.1, 0.45, 0.15))
    values = {record.name: record.value for record in found.records("x")}
    assert values["output_throughput x"] == pytest.approx(10)
    assert values["time to first response p50 x"] == pytest.approx(100)
    assert values["time to first response p99 x"] == pytest.approx(450)


@pytest.fixture
def fake_analyzer(tmp_path, monkeypatch):
    """Return a function that replaces perf_analyzer by shell commands.

    $export is the file to write, $calls how often it has run.
    """

    def make(body):
        script = tmp_path / "perf_analyzer"
        script.write_text(
            "#!/bin/bash\n"
            'while [ "$1" != --profile-export-file ]; do shift; done; export=$2\n'
            f"echo >> {tmp_path}/calls; calls=$(wc -l < {tmp_path}/calls)\n{body}\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(bench, "perf_analyzer", lambda: (script, dict(os.environ)))

    return make


WORK = TextWorkload([Job([1], 3)], ["a"])
NOWHERE = SimpleNamespace(grpc_url="localhost:1")


@pytest.mark.parametrize("length", [0, 40])
def test_a_truncated_export_is_retried(fake_analyzer, length):
    request = {"timestamp": 0, "request_inputs": {"sampling_parameters": '{"max_tokens": 3}'}}
    whole = json.dumps({"experiments": [{"requests": [request | {"response_timestamps": [2_000_000_000]}]}]})
    fake_analyzer(
        '[ -e "$export" ] && { echo "Error: Path must not already exist." >&2; exit 99; }\n'
        f"[ $calls = 1 ] && echo -n '{whole[:length]}' > $export || echo '{whole}' > $export"
    )
    found = run_perf_analyzer(NOWHERE, WORK)
    assert (found.tokens, found.seconds) == (3, 2)


def test_perf_analyzer_errors_are_reported(fake_analyzer):
    fake_analyzer('printf "failed to find\\nthe version\\nUsage: perf_analyzer [options]\\n -m\\n" >&2; exit 99')
    with pytest.raises(AnalyzerError, match=r"perf_analyzer exits with 99: failed to find the version$"):
        run_perf_analyzer(NOWHERE, WORK)


def test_non_streaming_load_has_no_inter_token_latency():
    found = LoadResult.of([load.ResponseTimes(0.0, [1.0]), load.ResponseTimes(0.0, [2.0])], tokens=2)
    assert [record.name for record in found.records("x") if "between" in record.name] == []


@pytest.mark.nightly
def test_server_overhead_with_a_null_model(demo_model, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--null", "--streams", "6", "--tokens", "8", "--json", str(file)]
    assert main(["bench", "server", *arguments]) == 0
    records = records_of(file)
    for who in ("in process", "server, lean client"):
        assert records[f"output_throughput null ({who})"]["value"] > 0
    assert records["output_throughput null (server, lean client)"]["target"] == 50_000
    assert 1 <= records["tokens per response null (server, lean client)"]["value"] <= 8
    assert set(records["cores busy null (server, lean client)"]["peers"]) == {"tritonserver", "model", "client"}


@pytest.mark.nightly
def test_a_served_model_is_compared_with_the_engine_alone(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--requests", "4", "--concurrency", "2", "--rate", "4", "--rounds", "1"]
    arguments += ["--streams", "4", "--tokens", "8", "--json", str(file)]
    assert main(["bench", "server", *arguments]) == 0
    records = records_of(file)
    assert records["server / in process mixed (server, lean client)"]["limit"] == 1
    for point in ("concurrency 2", "rate 4/s"):
        record = records[f"output_throughput {point}"]
        assert record["value"] is None or record["value"] > 0


@pytest.mark.nightly
def test_overhead_of_the_tensorrtllm_backend_models(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--streams", "2", "--tokens", "8", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "trtllm", *arguments]) == 0
    records = records_of(file)
    for what in ("time to first response", "time between responses"):
        for model in ("ensemble", "tensorrt_llm_bls"):
            name = f"{what} p50, 2 streams"
            added = records[f"added to {name} ({model})"]
            assert added["value"] == records[f"{name} ({model})"]["value"] - records[f"{name} (paged_llm)"]["value"]
            assert added["target"] == 1.0


@pytest.mark.nightly
def test_overhead_and_throughput_of_the_endpoints(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--streams", "2", "--tokens", "8", "--requests", "4", "--rounds", "1"]
    assert main(["bench", "gateway", *arguments, "--json", str(file)]) == 0
    records = records_of(file)
    for setting in ("real model, 2 at once", "steps that wait 20 ms, 2 at once"):
        for what in ("time to first response", "time between responses"):
            name = f"{what} p50, {setting}"
            for path in ("gateway", "Dynamo"):
                more = records[f"{name} ({path})"]["value"] - records[f"{name} (gRPC)"]["value"]
                assert records[f"added to {name} ({path})"]["value"] == more
    goal = records["added to time to first response p50, steps that wait 20 ms, 2 at once (Dynamo)"]
    assert goal["target"] == 10
    for what in ("streamed tokens", "whole answers of one token"):
        name = f"{what}, 2 at once"
        for path in ("gateway", "Dynamo"):
            share = records[f"{name} ({path})"]["value"] / records[f"{name} (gRPC)"]["value"]
            assert records[f"{name}: {path} / gRPC"]["value"] == pytest.approx(share)
    for path in ("gateway", "Dynamo"):
        assert records[f"tokens per event, streamed tokens, 2 at once ({path})"]["value"] >= 1
