"""The engine installed as a Triton backend, under its own name and under that of the vLLM backend."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from paged_backend.server.wire.tensors import INPUTS, OUTPUTS
from paged_client.cli import main
from tests.support.gateway import gateway
from tests.support.triton import plain_server, post
from tests.support.waiting import until

CONFIG = 'backend: "{backend}"\ninstance_group [ {{ count: 1 kind: {kind} }} ]\n'
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "of_vllm"
  model_version: -1
  input_map { key: "text_input" value: "text_input" }
  output_map { key: "text_output" value: "text_output" }
} ] }
"""
BACKENDS = pytest.mark.parametrize("name", ["vllm", pytest.param("paged", marks=pytest.mark.nightly)])
OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 4}


def add_model(repository, name, tiny, *, backend, kind="KIND_MODEL", config="", options=OPTIONS):
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(backend=backend, kind=kind) + config)
    (version / "model.json").write_text(json.dumps({"model": str(tiny), **options}))


@pytest.fixture(scope="module")
def installed(tiny, tiny_server, tmp_path_factory):
    """A server with a model of each backend name, which loads others on demand. `tiny_server` has the project's own
    model, with which they are compared."""
    repository, backends = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("backends")
    for name in ("paged", "vllm"):
        assert main(["install-backend", str(backends), "--name", name]) == 0
        add_model(repository, f"of_{name}", tiny[0], backend=name)
    (repository / "pipeline" / "1").mkdir(parents=True)
    (repository / "pipeline" / "config.pbtxt").write_text(ENSEMBLE)
    report = 'parameters { key: "REPORT_CUSTOM_METRICS" value { string_value: "false" } }'
    add_model(repository, "silent_by_config", tiny[0], backend="paged", config=report)
    add_model(repository, "silent_by_options", tiny[0], backend="vllm", options=OPTIONS | {"disable_log_stats": True})
    add_model(repository, "attribute", tiny[0], backend="vllm", options={"invalid_attribute": True})
    add_model(repository, "weights", repository / "nowhere", backend="vllm")
    other = 'input [ { name: "text_input" data_type: TYPE_INT32 dims: [ 1 ] } ]'
    add_model(repository, "tensor", tiny[0], backend="vllm", config=other)
    twice = 'parameters { key: "GPU_DEVICE_IDS" value { string_value: "0,0" } }'
    add_model(repository, "gpus", tiny[0], backend="vllm", config=twice)
    loaded = [f"--load-model={name}" for name in ("of_vllm", "pipeline")]
    with plain_server(repository, "--model-control-mode=explicit", *loaded, backends=backends) as running:
        yield running


def load(installed, name):
    with grpcclient.InferenceServerClient(installed.grpc_url) as client:
        if not client.is_model_ready(f"of_{name}"):
            client.load_model(f"of_{name}")


def config_of(server, model):
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/{model}/config") as reply:
        return json.load(reply)


@BACKENDS
def test_a_minimal_config_is_completed(installed, tiny_server, name):
    load(installed, name)
    body = {"text_input": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    (status, text), (_, expected) = post(installed, body, model=f"of_{name}"), post(tiny_server, body)
    assert status == 200
    answer = json.loads(text)
    assert answer["text_output"].startswith("Once")
    assert answer["text_output"] == json.loads(expected)["text_output"]


@BACKENDS
def test_the_completed_config_matches_the_repository_config(installed, tiny_server, name):
    load(installed, name)
    completed, own = config_of(installed, f"of_{name}"), config_of(tiny_server, "paged_llm")
    assert completed["backend"] == name
    assert completed["model_transaction_policy"] == own["model_transaction_policy"] == {"decoupled": True}
    assert completed["max_batch_size"] == own["max_batch_size"] == 0
    for kind in ("input", "output"):
        ours = {one["name"]: (one["data_type"], one["dims"], one.get("optional")) for one in own[kind]}
        assert {one["name"]: (one["data_type"], one["dims"], one.get("optional")) for one in completed[kind]} == ours
    assert {one["name"] for one in completed["input"]} == set(INPUTS)
    assert {one["name"] for one in completed["output"]} == set(OUTPUTS)


def test_the_gateway_serves_every_model_of_the_engine(installed):
    """Also one that is loaded later, until it is unloaded. The ensemble is not of the engine."""

    def served():
        return [card["id"] for card in front.ask("/v1/models")[1]["data"]]

    def count(model):
        return samples(installed, model).get(("vllm:generation_tokens_total",), 0)

    with grpcclient.InferenceServerClient(installed.grpc_url) as client:
        client.unload_model("of_paged")
        until(lambda: not client.is_model_ready("of_paged"), "the end of the model")
        with gateway(installed.grpc_url) as front:
            assert served() == ["of_vllm"]
            client.load_model("of_paged")
            for model in ("of_paged", "of_vllm"):
                before = count(model)
                body = {"model": model, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
                status, answer = front.ask("/v1/completions", body)
                assert (status, answer["model"]) == (200, model)
                until(lambda model=model, before=before: count(model) == before + 4, "the metrics of the model")
            assert served() == ["of_paged", "of_vllm"]
            client.unload_model("of_paged")
            until(lambda: not client.is_model_ready("of_paged"), "the end of the model")
            assert front.ask("/v1/completions", {"model": "of_paged", "prompt": "x"})[0] == 404
            assert served() == ["of_vllm"]


# The metrics of Triton's vLLM backend for requests, and of TensorRT-LLM for the pool.
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
HISTOGRAMS = (
    *("vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds"),
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_n"),
)
TRT_HISTOGRAMS = {
    "nv_llm_input_token_len": ("total_input_tokens", 12),
    "nv_llm_output_token_len": ("total_output_tokens", 24),
}


def samples(server, model):
    """Return a model's values in /metrics, by name and by the label that is neither the model nor the version."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as reply:
        text = reply.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^([\w:]+)\{(.*?)\} (\S+)$", text, re.M):
        labels = dict(re.findall(r'(\w+)="(.*?)"', labels))
        if labels.pop("model", None) == model and labels.pop("version") == "1" and not name.startswith("nv_inference"):
            found[(name, *labels.values())] = float(value)
    return found


def test_vllm_backend_metrics_count_each_request(installed):
    before = samples(installed, "of_vllm")
    sampling = {"max_tokens": 6, "ignore_eos": True}
    for body in ({"n": 2}, {}, {}):  # each has a prompt of 4 bytes
        assert post(installed, {"text_input": "Once", **sampling, **body}, model="of_vllm")[0] == 200
    after = samples(installed, "of_vllm")
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert [grown[name,] for name in COUNTERS] == [12, 24]
    for name in HISTOGRAMS:
        assert grown[f"{name}_count",] == grown[f"{name}_bucket", "+Inf"] == 3
        assert grown[f"{name}_sum",] > 0
    assert [grown[f"{name}_sum",] for name in HISTOGRAMS[4:]] == [12, 24, 4]
    assert [grown["vllm:request_params_n_bucket", most] for most in ("1", "2")] == [2, 3]
    for name, (label, total) in TRT_HISTOGRAMS.items():
        assert [grown[f"{name}_{what}", label] for what in ("count", "sum")] == [3, total]
        assert [grown[f"{name}_bucket", label, most] for most in ("10", "1000")] == [2 + (total == 12), 3]
    buckets = {float(le) for name, *le in after if name == "vllm:request_prompt_tokens_bucket" for le in le}
    assert buckets == {1, 2, 5, 10, 20, 50, 100, 200, float("inf")}


def test_inter_token_latency_has_a_value_per_token(installed):
    """These histograms are reported once a second, each in several parts, of which its count is the last."""
    of_steps = ("paged_batch_size", "paged_step_tokens", "vllm:iteration_tokens_total")
    of_tokens = ("paged_inter_token_latency_seconds", "vllm:inter_token_latency_seconds")

    def is_reported():
        now = samples(installed, "of_vllm")
        steps = now["nv_trt_llm_general_metrics", "iteration_counter"]
        later_tokens = now["vllm:generation_tokens_total",] - now["vllm:request_params_n_sum",]  # all but the first
        return (
            now["paged_steps_total", "yes"] + now["paged_steps_total", "no"] == steps
            and all(now[f"{name}_count",] == steps for name in of_steps)
            and all(now[f"{name}_count",] == later_tokens for name in of_tokens)
        )

    until(is_reported)
    before = samples(installed, "of_vllm")
    asked = {"text_input": "a#7z", "max_tokens": 6, "ignore_eos": True, "n": 2}  # no block is cached
    assert post(installed, asked, model="of_vllm")[0] == 200
    until(is_reported)
    after = samples(installed, "of_vllm")
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    for name in of_tokens:
        assert grown[f"{name}_count",] == grown[f"{name}_bucket", "+Inf"] == 10  # of each sample all but the first
        assert grown[f"{name}_sum",] > 0
    assert grown["paged_batch_size_count",] == grown["paged_step_tokens_count",] == 6
    assert grown["paged_step_tokens_sum",] == 4 + 2 * 5  # the prompt, then a token of each sample per step
    assert all(after["paged_step_seconds_total", phase] > 0 for phase in ("schedule", "launch", "commit"))


def test_tensorrt_llm_gauges(installed):
    """Of an idle server that has found the beginning of a prompt in its cache."""
    hits, blocks = ("paged_prefix_cache_hit_tokens_total",), "nv_trt_llm_kv_cache_block_metrics"
    before = samples(installed, "of_vllm")[hits]
    for _ in range(2):
        assert post(installed, {"text_input": "7#gauges", "max_tokens": 2}, model="of_vllm")[0] == 200
    until(lambda: (now := samples(installed, "of_vllm"))[hits] > before and now[blocks, "used"] == 0, "an idle server")
    now = samples(installed, "of_vllm")
    kinds = ("max", "used", "free", "tokens_per", "fraction")
    assert [now[blocks, kind] for kind in kinds] == [64, 0, 64, 4, 0]
    assert now[blocks, "reused"] == now[hits] // 4 > 0
    kinds = ("max", "active", "scheduled", "waiting", "context")
    assert [now["nv_trt_llm_request_metrics", kind] for kind in kinds] == [4, 0, 0, 0, 0]
    kinds = ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests")
    assert [now["nv_trt_llm_inflight_batcher_metrics", kind] for kind in kinds] == [0, 0, 0, 0]
    kinds = ("gpu", "pinned")
    assert [now["nv_trt_llm_runtime_memory_metrics", kind] for kind in kinds] == [0, 0]
    resident = resident_memory(b"of_vllm_0", installed.http_url.rpartition(":")[2].encode())
    assert now["nv_trt_llm_runtime_memory_metrics", "cpu"] == pytest.approx(resident, rel=0.5)


def resident_memory(*words):
    """Return the bytes of memory of the stub process with these words in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (process / "cmdline").read_bytes(), (process / "status").read_text()
        except OSError:
            continue
        if b"python_backend_stub" in command and all(word in command for word in words):
            return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    raise AssertionError(f"no process of {words}")


def test_tensorrt_llm_metrics_of_steps(installed):
    """The time of a step is in whole seconds."""
    general = "nv_trt_llm_general_metrics"
    before = samples(installed, "of_vllm")
    until(lambda: int(time.time()) > before[general, "timestamp"], "the next second")
    began = int(time.time())
    assert post(installed, {"text_input": "2#zq", "max_tokens": 5, "ignore_eos": True}, model="of_vllm")[0] == 200
    steps = before[general, "iteration_counter"] + 5
    until(lambda: samples(installed, "of_vllm")[general, "iteration_counter"] == steps, "the metrics of all steps")
    assert began <= samples(installed, "of_vllm")[general, "timestamp"] <= time.time()


def test_metrics_can_be_disabled(adapted_server):
    assert post(adapted_server, {"text_input": "Once"})[0] == 200
    assert samples(adapted_server, "paged_llm") == {}


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["silent_by_config", "silent_by_options"])
def test_a_model_is_loaded_and_unloaded_on_demand_and_its_metrics_can_be_disabled(installed, model):
    with grpcclient.InferenceServerClient(installed.grpc_url) as client:
        client.load_model(model)
        assert post(installed, {"text_input": "Once", "max_tokens": 2}, model=model)[0] == 200
        assert samples(installed, model) == {}
        client.unload_model(model)
        until(lambda: not client.is_model_ready(model), "the end of a model")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("attribute", "invalid_attribute: unknown engine option"),
        pytest.param("weights", "nowhere", marks=pytest.mark.nightly),
        ("gpus", 'GPU_DEVICE_IDS="0,0": names a GPU twice'),
        ("tensor", "configuration expects datatype TYPE_INT32 for input 'text_input'"),
    ],
)
def test_a_model_that_cannot_be_loaded_reports_why_and_does_not_affect_others(installed, model, reason):
    refused = pytest.raises(InferenceServerException, match=reason)
    with grpcclient.InferenceServerClient(installed.grpc_url) as client, refused:
        client.load_model(model)
    assert post(installed, {"text_input": "Once", "max_tokens": 2}, model="of_vllm")[0] == 200


@pytest.mark.nightly
def test_a_server_without_metrics(tiny, tmp_path, installed):
    add_model(tmp_path, "good", tiny[0], backend="vllm")
    with plain_server(tmp_path, "--allow-metrics=false", backends=installed.backends) as quiet:
        assert post(quiet, {"text_input": "Once", "max_tokens": 2}, model="good")[0] == 200


def test_an_ensemble_can_use_the_model_as_a_step(installed):
    status, text = post(installed, {"text_input": "Once", "max_tokens": 3}, "generate_stream", model="pipeline")
    assert status == 200
    assert json.loads(text.removeprefix("data: "))["text_output"].startswith("Once")
