"""Tests of the CPU benchmark: contestants in other environments, scenarios and the report."""

import json
import os
import select
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from client.cli import main
from paged_bench._child import CHILDREN, Child, ChildError
from paged_bench._cpu_contestants import Contestants
from paged_bench._cpu_report import target_report
from paged_bench._cpu_scenarios import (
    DECODE,
    PADDED,
    PEERS,
    VLLM_NAME,
    Scenario,
    output_rate,
    permute_tokens,
    scenarios,
    step_ms,
)
from paged_bench._report import Record
from paged_bench._workload import Job, Run, workload
from paged_bench.cpu import agreement, measure
from paged_bench.engine import OURS

FAKE = """
import os, sys
sys.path.insert(0, {children!r})
from protocol import Clock, serve

def load(first):
    print("a library that prints")
    return {{"first": first, "pid": os.getpid(), "group": os.getpgrp()}}

def run(jobs):
    clock = Clock(jobs)
    for key, job in enumerate(jobs):
        if not job["prompt"]:
            os._exit(3)
        for at in range(job["output"]):
            for sample in range(job["n"]):
                clock.tokens(key, sample, [job["prompt"][at]], job["arrival"] + at)
    return clock.result()

serve({{"load": load, "run": run}})
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE.format(children=str(CHILDREN)))
    child = Child([sys.executable, script], tmp_path / "log")
    yield child
    child.close()


def test_child_runs_jobs_and_returns_its_settings(fake, tmp_path):
    assert fake.load(first=7)["first"] == 7
    run = fake([Job([5, 6, 7], 2, arrival=9.0), Job([8, 9], 1, n=2)])
    assert run.outputs == [[5, 6], [8]]
    assert run.stamps == [[0, 1], [0], [0]]
    assert run.seconds > 0
    assert "a library that prints" in (tmp_path / "log").read_text()


def test_child_errors_name_the_log(fake, tmp_path):
    with pytest.raises(ChildError, match=r"load: TypeError: .*unexpected keyword"):
        fake.load(second=7)
    with pytest.raises(ChildError, match="run: IndexError"):
        fake([Job([5], 2)])
    with pytest.raises(ChildError, match=f"run: it exited with 3; its log is {tmp_path / 'log'}"):
        fake([Job([], 1)])
    with pytest.raises(ChildError, match="run: "):
        fake([Job([5], 1)])


def test_child_process_group_is_stopped_between_commands(fake):
    about = fake.load(first=1)
    assert about["group"] == about["pid"]
    deadline = time.monotonic() + 60
    while not os.waitpid(about["pid"], os.WUNTRACED | os.WNOHANG)[0]:
        assert time.monotonic() < deadline
    assert fake([Job([5], 1)]).outputs == [[5]]


def test_closed_child_exits_by_itself(tmp_path):
    script, end = tmp_path / "fake_child.py", tmp_path / "end"
    after = f"open({str(end)!r}, 'w').close()"
    script.write_text(FAKE.format(children=str(CHILDREN)) + after)
    child = Child([sys.executable, script], tmp_path / "log")
    child.load(first=1)
    child.close()
    assert end.exists()


def test_child_exits_with_its_parent(tmp_path):
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE.format(children=str(CHILDREN)))
    parent = (
        "import os, sys; from pathlib import Path; from paged_bench._child import Child;"
        f"child = Child([sys.executable, {str(script)!r}], Path({str(tmp_path / 'log')!r}));"
        "pid = child.load(first=1)['pid']; os.waitpid(pid, os.WUNTRACED); print(pid, flush=True);"
        "sys.stdin.readline(); os._exit(1)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        watched = os.pidfd_open(int(started.stdout.readline()))
    ended, _, _ = select.select([watched], [], [], 60)
    os.close(watched)
    assert ended


def run_of(*outputs, gap=1.0):
    return Run(
        gap,
        len(outputs),
        [[gap * (at + 1) for at in range(len(one))] for one in outputs],
        [list(one) for one in outputs],
    )


def test_absent_and_failed_peers_are_reported():
    def fails(jobs):
        raise RuntimeError("out of memory\nand more")

    jobs = [Job([1, 2], 2), Job([3], 1)]
    contestants = Contestants({OURS: lambda jobs: run_of([1, 2], [3]), VLLM_NAME: fails}, {"another": "no wheel"})
    scenario = Scenario("words", jobs, output_rate, "tokens/s", {VLLM_NAME: 1.3, "another": 2.0})
    records = {one.name: one for one in measure(scenario, contestants, 10, rounds=2, exact=True)}
    assert records["words"].value == 3 and records["words"].peers == {}
    theirs, another = records[f"words: times {VLLM_NAME}"], records["words: times another"]
    assert (theirs.value, theirs.unit, theirs.target) == (None, "not measured: RuntimeError: out of memory", 1.3)
    assert (another.value, another.unit, another.target) == (None, "not measured: no wheel", 2.0)


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


def test_permuted_tokens_keep_shared_prefixes():
    first, second = permute_tokens(4, [Job([1, 2, 3], 5), Job([1, 2, 4], 6)], 50)
    assert first.prompt[:2] == second.prompt[:2] != [1, 2]
    assert first.prompt[2] != second.prompt[2]


def test_step_time_needs_all_sequences_decoding():
    stamps = [[1.0, 2.0, 3.0, 7.0, 11.0, 12.0], [3.0, 7.0, 11.0, 15.0, 16.0, 17.0]]
    assert step_ms(Run(17.0, 2, stamps), []) == 4000.0
    with pytest.raises(ValueError, match="no step in which all 2 sequences decode"):
        step_ms(Run(4.0, 2, [[1.0, 2.0], [3.0, 4.0]]), [])


def test_exact_agreement_has_a_target():
    exact = agreement("same", [run_of([1, 2], [3])], [run_of([1, 2], [3])], exact=True)
    assert (exact.value, exact.target, dict(exact.peers)) == (100.0, 100.0, {})


def test_target_report():
    lines = list(
        target_report(
            [
                Record("a step", 35.0, "ms", 28.0),
                Record("another", 14.0, "ms", 28.0),
                Record("a ratio", 1.17, "x", 1.3),
                Record("a peer", None, "not measured: no wheel", 2.0),
                Record("no target", 1.0, "x"),
            ]
        )
    )
    assert [line[:16].strip() for line in lines] == ["missed by 25%", "reached", "missed by 10%", "not measured"]
    assert "no wheel" in lines[3]


def test_scenarios_and_their_targets():
    found = {one.name: one for one in scenarios(1000, 2048, 8.0, quick=False)}
    assert found[DECODE].target == 28.0
    assert list(found[DECODE].ratios.values()) == [1.5, 2.5, 10.0]
    assert [(len(job.prompt), job.output) for job in found[DECODE].jobs] == [(512, 64)] * 16
    even = [
        found[f"even lengths{how}"] for how in ("", ", 8 requests/s", ", 4 samples", " behind 512 tokens in common")
    ]
    assert all(one.ratios == {VLLM_NAME: 1.3} and len(one.jobs) == 32 for one in even)
    assert sum(job.output for job in even[0].jobs) == 3260
    assert even[1].jobs[-1].arrival > 0
    assert {job.n for job in even[2].jobs} == {4}
    assert len({tuple(job.prompt[:512]) for job in even[3].jobs}) == 1
    for quick in (False, True):
        covered = {who for one in scenarios(1000, 2048, 8.0, quick) for who in one.ratios}
        assert covered == {who for names in PEERS.values() for who in names}


def test_even_workload_token_counts():
    jobs = workload("even", 32, vocab_size=100, limit=4096)
    assert (sum(len(job.prompt) for job in jobs), sum(job.output for job in jobs)) == (4609, 3260)


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
    records = {record["name"]: record for record in json.loads(file.read_text())}
    assert records[f"{DECODE}: times {VLLM_NAME}"]["unit"] == "not measured: not among --peers (generate)"
    assert records[f"{DECODE}: same as {PADDED}"]["value"] == 100
    assert records[f"{DECODE}: times {PADDED}"]["target"] == 2.5
    parts = [records[f"{DECODE}: {part}"]["value"] for part in ("linears", "attention", "rotate and write", "norms")]
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
