"""Benchmarks run and write their records and a picture. Measured values are not checked."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from client.cli import main
from paged_bench import kernels
from paged_bench._attention import AttentionInputs, Cell, error
from paged_bench._attention_contestants import CONTESTANTS, NO_SHARED_PREFIX, UNQUANTIZED, contestants, targets
from paged_bench._lines import LINES
from paged_bench._peers import padded
from paged_bench._report import arguments, parser
from paged_bench._workload import MODELS, WORKLOADS, Job, model_names, workload
from paged_kernels.cpu import native
from tests.support.in_process import save_tiny
from tests.support.records import records_of


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
    assert all(record["value"] is None or record["value"] >= 0 for record in records.values())
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


def test_padded_batch_is_limited_by_memory(tiny):
    jobs = [Job([1] * prompt, 4) for prompt in (5, 12, 7)]
    row = (12 + 4) * 3 * 2 * 2 * 16 * 4  # slots, layers, keys and values, heads, width, float32
    for memory, count in ((math.inf, 3), (2 * row, 2), (2 * row - 1, 1), (0, 1)):
        run = padded(tiny[1], memory)(jobs)
        assert run.requests == count
        assert run.peak_tokens == sum(len(job.prompt) + 3 for job in jobs[:count])


def test_latency_starts_at_the_arrival(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--workload", "alpaca", "--rate", "50", "--alone", "--requests", "4", "--rounds", "1"]
    assert main(["bench", "engine", "--model", str(tiny[0]), *arguments, "--json", str(file)]) == 0
    records = records_of(file)
    assert records["time to first token p99 alpaca (paged)"]["value"] > 0
    assert records["output_throughput alpaca"]["peers"] == {}


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


@pytest.mark.parametrize("name", model_names())
def test_models_without_weights_have_valid_configurations(name):
    config = AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx({"Qwen3-0.6B": 0.596, "Llama-3.1-8B": 8.03}[name], rel=0.01)


def test_kernels_benchmark(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["bench", "kernels", "--quick", "--only", "decode", "--json", str(file)]) == 0
    records = records_of(file)
    errors = {name: record for name, record in records.items() if name.endswith(": error")}
    assert len(errors) >= 1
    for record in errors.values():
        assert all(value < record["limit"] for value in (record["value"], *record["peers"].values()))
        assert "SDPA, contiguous" in record["peers"]
        if native.levels() and not torch.cuda.is_available():
            lower = {*native.levels(), "PyTorch"} - {native.level(), "amx_emulated"}
            assert {f"paged, {one}" for one in lower} <= record["peers"].keys()
    assert all(records[f"{name}, 16 tokens"]["value"] > 0 for name in LINES)
    if not torch.cuda.is_available():
        (cell,) = (name for name in records if name.startswith("decode") and ":" not in name)
        assert records[f"{cell}: flex_attention, contiguous"]["unit"] == "not measured: no GPU"
        assert records[cell]["limit"] == records["read-only stream"]["value"]
    assert "gather + SDPA" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"mixed": True}, {"pool": torch.int8}, {"query": 9, "context": 40}])
def test_all_attention_contestants_agree(change):
    half = torch.float32
    cell = replace(Cell("decode", 3, 70, 1, 6, 2, 16, half, half), **change)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    tried = [CONTESTANTS[who] for who in ("paged", "SDPA, contiguous", "gather + SDPA")]
    for make in tried if cell.pool == cell.dtype else [tried[0], tried[2]]:
        assert error(prepared, make(prepared)(0)) < 1e-4


def test_wrong_attention_output_is_detected():
    cell = Cell("decode", 3, 70, 1, 6, 2, 16, torch.float32, torch.float32)
    prepared = AttentionInputs(cell, torch.device("cpu"), 1 << 20)
    assert error(prepared, CONTESTANTS["paged"](prepared)(0).roll(1, 0)) > 0.1


def test_memory_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "memory", "--model", str(tiny[0]), "--quick", "--json", str(file)]) == 0
    records = records_of(file)
    waste = [records[f"waste ShareGPT block_size={size}"]["value"] for size in (1, 4, 16, 64, 256)]
    assert waste[0] == 0
    assert waste == sorted(waste)
    assert records["waste ShareGPT block_size=16"]["peers"]["contiguous, oracle"] > waste[2]
    for n in (2, 4):
        saved = records[f"saved by sharing ShareGPT n={n}"]
        assert abs(saved["value"] - saved["peers"]["by arithmetic"]) < 1


def test_every_attention_target_has_a_baseline():
    """Targets that compare cells of the GPU grid: KV dtype, shared prefix and long context."""
    cells = kernels.grid(torch.device("cuda"), quick=False)
    aimed = {who: value for cell in cells for who, value in targets(cell).items()}
    assert aimed.keys() <= CONTESTANTS.keys()
    assert aimed[UNQUANTIZED] == 1.8
    for cell in cells:
        who = contestants(cell, torch.device("cuda"))
        assert (UNQUANTIZED in who) == (cell.pool != cell.dtype)
        assert (NO_SHARED_PREFIX in who) == (cell.shared > 0)
    (one,) = (cell for cell in cells if cell.shared and cell.batch == 64)
    assert targets(one)[NO_SHARED_PREFIX] == pytest.approx(0.7 * 8.0)  # the formula's 8 for 64 rows of 2,048 + 256
    long = [cell for cell in cells if cell.batch == 1 and cell.context == 32768 and cell.kind == "decode"]
    assert long and all(targets(cell)["vLLM"] == 1.15 for cell in long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--rounds", "0"], "'0': must be a whole number of at least 1"),
        (["engine", "--rate", "0"], "'0': must be a number above 0"),
        (["server", "--null", "--tokens", "-3"], "'-3': must be a whole number of at least 1"),
        (["kernels", "--json", "/nonexistent/x.json"], "there is no directory '/nonexistent'"),
        (["memory", "--requests", "99"], "'99': must be at least 100, so that some wait for blocks"),
        (["kernels", "--only", "nothing"], "argument --only: 'nothing': matches none of"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert message in capsys.readouterr().err


def test_unknown_option_is_reported(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "engine", "--fast"])
    assert "--fast" in capsys.readouterr().err


def test_window_longer_than_the_context_is_rejected(tiny, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "kv_dtype", "--quick", "--model", str(tiny[0]), "--length", "100000"])
    assert "argument --length: 100000: must be at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine", "--model", "/nope"], "paged bench: model='/nope': must be 'demo'"),
        (["speculation", "--draft", "/nope"], 'paged bench: speculative_model="/nope": '),
    ],
)
def test_engine_errors_are_reported_in_one_line(tiny, arguments, message, capsys):
    name, *rest = arguments
    assert main(["bench", name, "--quick", "--model", str(tiny[0]), *rest]) == 2
    assert message in capsys.readouterr().err


def test_kv_dtype_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "kv_dtype", *arguments]) == 0
    assert "2 windows of 40 tokens" in capsys.readouterr().out
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert [value[f"bytes per token {kind}"] for kind in ("auto", "fp8", "int8")] == [12 * 64, 12 * 20, 12 * 20]
    assert value["KL divergence auto"] == 0
    assert 0 < value["KL divergence int8"] < value["KL divergence fp8"]
    assert value["same top token auto"] == 100


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs AVX512-VNNI")
def test_quantization_benchmark(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("paged_backend.models.linear.MIN_ELEMENTS", 0)
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "quantization", *arguments]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert value["KL divergence float32"] == 0
    assert 0 < value["KL divergence bfloat16"] < value["KL divergence int8"]
    assert value["same top token float32"] == 100
    assert value["step of 16 int8"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_speculation_benchmark(tiny, tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--quick", "--length", "20", "--output", "12", "--draft-tokens", "3"]
    assert main(["bench", "speculation", *arguments, "--draft", str(tiny[0]), "--json", str(file)]) == 0
    assert "round 1 of 1: none" in capsys.readouterr().err
    value = {name: record["value"] for name, record in records_of(file).items()}
    for kind in ("repeating a text", "going on with one"):
        assert value[f"{kind}: accepted (draft model, 3)"] > 95  # the model is its own draft model
        assert value[f"{kind}: tokens_per_step (draft model, 3)"] > 3
        assert value[f"{kind}: throughput_ratio (prompt lookup, 3)"] > 0


def test_guided_benchmark_without_its_peer(tiny, tmp_path, capsys, monkeypatch):
    """The peer is not installed."""
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--rounds", "1", "--batches", "2", "--json", str(file)]
    assert main(["bench", "guided", *arguments]) == 0
    assert "xgrammar: not measured: " in capsys.readouterr().out
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert value["JSON Schema ignored: llguidance"] == value["regular expressions ignored: llguidance"] == 0
    assert value["JSON Schema held to: llguidance"] + value["JSON Schema refused: llguidance"] == 38
    assert value["a token of a schema, 2 rows"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_long_prompt_fits_into_the_pool(tmp_path, capsys):
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=320)
    save_tiny(LlamaConfig(**shape, max_position_embeddings=8192), tmp_path)
    arguments = ["--model", str(tmp_path), "--quick", "--workload", "long", "--alone"]
    assert main(["bench", "engine", *arguments]) == 0
    assert "4096 prompt and 128 output tokens" in capsys.readouterr().out


def test_explicit_options_override_quick():
    made = parser("engine", "")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--requests", type=int)

    def chosen(*argv):
        args = arguments(made, argv, {"rounds": 1, "requests": 4})
        return args.rounds, args.requests

    assert chosen() == (3, None)
    assert chosen("--quick") == (1, 4)
    assert chosen("--quick", "--rounds", "3") == (3, 4)
    assert chosen("--requests", "9", "--quick") == (1, 9)


def test_lora_benchmark(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--rows", "4", "--adapters", "2", "--rounds", "1"]
    assert main(["bench", "lora", *arguments, "--json", str(file)]) == 0
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert all(value[f"step of 4 rows, {number} adapters"] > 0 for number in (0, 1, 2))
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
