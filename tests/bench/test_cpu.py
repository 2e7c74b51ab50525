"""The CPU benchmark: rounds, ratios and agreement with its peers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_bench._cpu_contestants import Contestants
from paged_bench._cpu_scenarios import DECODE, PADDED, VLLM_NAME, Scenario, output_rate, step_ms
from paged_bench._workload import Job
from paged_bench.cpu import agreement, measure
from paged_bench.engine import OURS
from paged_client.cli import main
from tests.support.benchmark_runs import run_of


def test_run_without_steady_step_is_reported():
    contestants = Contestants({who: lambda jobs: run_of([1]) for who in (OURS, VLLM_NAME)})
    scenario = Scenario("words", [Job([1], 1)], step_ms, "ms", {VLLM_NAME: 1.3}, 28.0)
    records = {one.name: one for one in measure(scenario, contestants, 10, rounds=1, exact=False)}
    why = "NoSteadyStep: no step in which all 1 sequences decode"
    assert (records["words"].unit, records["words"].target) == (f"not measured: {why}", 28.0)
    assert records[f"words: times {VLLM_NAME}"].unit.startswith("not measured: ")


@pytest.mark.parametrize(("figure", "unit"), [(output_rate, "tokens/s"), (step_ms, "ms")])
def test_ratios_above_one_are_in_our_favour(figure, unit):
    contestants = Contestants(
        {OURS: lambda jobs: run_of([1, 2, 3]), VLLM_NAME: lambda jobs: run_of([1, 2, 4], gap=2.0)}
    )
    scenario = Scenario("words", [Job([1], 3)], figure, unit, {VLLM_NAME: 1.3})
    records = {one.name: one for one in measure(scenario, contestants, 10, rounds=3, exact=False)}
    paired = records[f"words: times {VLLM_NAME}"]
    assert (paired.value, dict(paired.peers)) == (2.0, {"p10": 2.0, "p90": 2.0})
    same = records[f"words: same as {VLLM_NAME}"]
    assert (same.value, same.target, dict(same.peers)) == (0.0, None, {"tokens before they differ, median": 2})


def test_each_round_has_new_tokens_for_all_contestants():
    asked = {OURS: [], VLLM_NAME: []}

    def contestant(who):
        return lambda jobs: asked[who].append([job.prompt for job in jobs]) or run_of([1])

    contestants = Contestants({who: contestant(who) for who in asked})
    measure(
        Scenario("words", [Job([1, 2, 1], 1)], output_rate, "tokens/s", {VLLM_NAME: None}),
        contestants,
        50,
        3,
        exact=False,
    )
    assert asked[OURS] == asked[VLLM_NAME]
    assert len({tuple(prompt) for (prompt,) in asked[OURS]}) == 3


def test_exact_agreement_has_a_target():
    exact = agreement("same", [run_of([1, 2], [3])], [run_of([1, 2], [3])], exact=True)
    assert (exact.value, exact.target, dict(exact.peers)) == (100.0, 100.0, {})


@pytest.mark.nightly
def test_cpu_benchmark(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the benchmark sets for the processes that it starts
    threads, file = torch.get_num_threads(), tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--dtype", "float32", "--peers", "generate", "--threads", "1"]
    try:
        assert main(["bench", "cpu", *arguments, "--quick", "--json", str(file)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    records = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    assert records[f"{DECODE}: times {VLLM_NAME}"]["unit"] == "not measured: not among --peers (generate)"
    assert records[f"{DECODE}: same as {PADDED}"]["value"] == 100
    assert records[f"{DECODE}: times {PADDED}"]["target"] == 2.5
    parts = [
        records[f"{DECODE}: {part}"]["value"] for part in ("linears and activation", "attention", "rotate and write")
    ]
    assert all(part > 0 for part in parts)
    # 3 layers of 2 heads of 16, keys and values in 4 bytes, of 16 sequences in the middle of their 32 tokens
    kept = records[f"{DECODE}: least for keys and values"]["peers"]["MB"]
    assert kept == pytest.approx(16 * (224 + 16) * 3 * 2 * 2 * 16 * 4 / 1e6)
    own = AutoModelForCausalLM.from_pretrained(tiny[0])
    weights = sum(one.numel() * 4 for name, one in own.named_parameters() if name != "model.embed_tokens.weight")
    assert records[f"{DECODE}: least for weights"]["peers"]["MB"] == pytest.approx(weights / 1e6)
    shown = capsys.readouterr().out
    assert "paged: dtype=float32, block_size=16, enable_prefix_caching=True" in shown
    assert f"not measured     {DECODE}: times {VLLM_NAME}: not among --peers (generate)" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm,tgi"], "'tgi': must be one of vllm, llama.cpp, generate, batching"),
        (["--threads", "0"], "'0': must be a whole number of at least 1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "cpu", *arguments])
    assert message in capsys.readouterr().err
