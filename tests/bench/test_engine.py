"""Workloads, models, and the benchmark of the engine. Measured values are not checked."""

from argparse import ArgumentTypeError
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_bench import engine
from paged_bench._engine import (
    MODELS,
    NULL,
    TABLE,
    WORKLOADS,
    blocks_for,
    byte_tokenizer,
    model_names,
    model_options,
    workload,
    workload_name,
)
from paged_client.cli import main
from tests.support.in_process import save_tiny
from tests.support.records import records_of

# --- workload ---------------------------------------------------------------------------------------------------------


def test_even_workload_token_counts():
    jobs = workload("even", 32, vocab_size=100, limit=4096)
    assert (sum(len(job.prompt) for job in jobs), sum(job.output for job in jobs)) == (4609, 3260)


def test_nano_vllm_workload_has_its_token_counts():
    jobs = workload("nano", 256, vocab_size=100, limit=4096)
    assert (sum(len(job.prompt) for job in jobs), sum(job.output for job in jobs)) == (142_827, 133_966)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_workloads_fit_the_model_and_are_deterministic(name):
    jobs = workload(name, 32, vocab_size=50, limit=300, rate=10.0)
    assert jobs == workload(name, 32, vocab_size=50, limit=300, rate=10.0)
    assert all(len(job.prompt) >= 1 and len(job.prompt) + job.output <= 300 and job.output >= 1 for job in jobs)
    assert all(0 <= token < 50 for job in jobs for token in job.prompt)
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)


@pytest.mark.parametrize("name", TABLE)
def test_requests_of_equal_lengths_are_not_shortened(name):
    count, prompt, output = map(int, name.replace("x", "/").split("/"))
    jobs = workload(workload_name(name), 3, vocab_size=50, limit=40960)
    assert [(len(job.prompt), job.output) for job in jobs] == [(prompt, output)] * count
    assert blocks_for([name], 3) * 16 >= count * (prompt + output)


@pytest.mark.parametrize("name", ["16x512", "0x5/5", "16x512/256 ", "fast"])
def test_unknown_workloads_are_rejected(name):
    with pytest.raises(ArgumentTypeError, match="or REQUESTSxPROMPT/OUTPUT, such as 16x512/256"):
        workload_name(name)


def test_random_weights_need_no_download(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    options = model_options("Qwen3-0.6B")
    assert options["load_format"] == "dummy"
    assert len(AutoTokenizer.from_pretrained(options["tokenizer"])) == 151936
    (directory,) = (tmp_path / "models").iterdir()
    made = (directory / "tokenizer.json").stat().st_mtime_ns
    assert model_options("Qwen3-0.6B") == options
    assert (directory / "tokenizer.json").stat().st_mtime_ns == made


@pytest.mark.parametrize("name", model_names())
def test_models_without_weights_have_valid_configurations(name):
    config = AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == pytest.approx(
        {"Qwen3-0.6B": 596e6, "Llama-3.1-8B": 8.03e9, "Llama-3.3-70B": 70.6e9, "tiny": 459e3}[name], rel=0.01
    )


# --- byte tokenizer ---------------------------------------------------------------------------------------------------


def test_text_becomes_bytes_and_every_token_has_a_text():
    tokenizer = byte_tokenizer(300)
    assert len(tokenizer) == 300
    ids = tokenizer.encode("añ 299", add_special_tokens=False)
    assert len(ids) == len("añ 299".encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == "añ 299"
    assert tokenizer.decode([257, 299]) == " 257 299"
    assert tokenizer.eos_token_id == 256


# --- null model -------------------------------------------------------------------------------------------------------


def test_a_model_without_an_embedding_loads(tmp_path):
    byte_tokenizer(300).save_pretrained(tmp_path)
    options = model_options(NULL) | {"tokenizer": str(tmp_path), "num_gpu_blocks_override": 8, "device": "cpu"}
    assembly = assemble(EngineConfig.from_options(options))
    assert assembly.loaded.spec.generates


# --- engine -----------------------------------------------------------------------------------------------------------


def test_engine_benchmark(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    file = tmp_path / "figures.json"
    workloads = ["--workload", "mixed", "--workload", "beam4"]
    arguments = [
        "--model",
        str(tiny[0]),
        "--quick",
        "--requests",
        "3",
        "--rounds",
        "2",
        *workloads,
        "--json",
        str(file),
    ]
    assert main(["bench", "engine", *arguments]) == 0
    records = records_of(file)
    assert set(records["output_throughput mixed"]["peers"]) == {
        "transformers, continuous",
        "transformers, one padded batch",
        "transformers, one at a time",
    }
    assert set(records["output_throughput beam4"]["peers"]) == {"transformers, one padded batch"}
    for record in records.values():
        assert (record["value"] is None) == record["unit"].startswith("not measured: "), record
    ratio = records["output_throughput_ratio mixed (transformers, one at a time)"]
    assert ratio["peers"]["p10"] <= ratio["value"] <= ratio["peers"]["p90"]
    assert records["kv_slots_per_token_at_peak mixed"]["value"] >= 1
    for who in ("paged", "transformers, continuous"):
        first, between = (records[f"time {what} p99 mixed ({who})"] for what in ("to first token", "between tokens"))
        assert first["value"] > 0 and between["value"] > 0
    (settings,) = (
        one for name, one in records.items() if name.startswith("settings mixed (transformers, continuous):")
    )
    assert settings["name"].endswith(": sdpa, fifo") or torch.cuda.is_available()
    assert settings["peers"]["max_batch_tokens"] == 512 and settings["peers"]["max_requests_per_batch"] == 3
    if not torch.cuda.is_available():
        assert records["GPU idle mixed"]["unit"] == "not measured: no GPU"
        assert records["output_throughput_ratio mixed (transformers, continuous, tuned)"]["value"] is None
    shown = capsys.readouterr()
    assert "torch " in shown.out
    assert "round 2 of 2: paged" in shown.err


def test_latency_starts_at_the_arrival(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--workload", "alpaca", "--rate", "50", "--alone", "--requests", "4", "--rounds", "1"]
    assert main(["bench", "engine", "--model", str(tiny[0]), *arguments, "--json", str(file)]) == 0
    records = records_of(file)
    assert records["time to first token p99 alpaca (paged)"]["value"] > 0
    assert records["output_throughput alpaca"]["peers"] == {}


@pytest.mark.nightly
def test_long_prompt_fits_into_the_pool(tmp_path, capsys):
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=320)
    save_tiny(LlamaConfig(**shape, max_position_embeddings=8192), tmp_path)
    arguments = ["--model", str(tmp_path), "--quick", "--workload", "long", "--alone"]
    assert main(["bench", "engine", *arguments]) == 0
    assert "4096 prompt and 128 output tokens" in capsys.readouterr().out


# --- gpu idle ---------------------------------------------------------------------------------------------------------


def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


@pytest.fixture
def profiled(monkeypatch):
    """Two steps of two launches each, beside a function of the host."""
    events = [event("attend", 0, 30), event("cast", 30, 40), event("attend", 50, 90), event("cast", 90, 95)]
    events.append(event("host", 0, 1000, torch.autograd.DeviceType.CPU))

    class Profiler:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_time_and_launches_of_each_kernel_in_a_step(profiled):
    whole, *kernels = engine.kernels("2x8/2", 2, lambda: None)
    assert (whole.name, whole.value, whole.peers) == ("GPU time of a step 2x8/2", 42.5, {"launches": 2.0})
    assert [(one.name.rpartition(": ")[2], one.value, one.peers["launches"]) for one in kernels] == [
        ("attend", 35.0, 1.0),
        ("cast", 7.5, 1.0),
    ]


def test_idle_time_is_what_no_kernel_covers(profiled, monkeypatch):
    seconds = iter((0.0, 100e-6))
    monkeypatch.setattr(engine.time, "perf_counter", lambda: next(seconds))
    assert engine.gpu_idle(lambda: None) == pytest.approx(15.0)  # 85 of 100 us
