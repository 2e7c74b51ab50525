"""The CPU benchmark: scenarios, contestants, busy neighbours, ratios and targets."""

import json
import os
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_bench import cpu
from paged_bench._engine import OURS, Job, Run, permute_tokens
from paged_bench._harness import Record
from paged_bench._levels import limited_threads
from paged_bench._processes import LEADER
from paged_bench.cpu import (
    DECODE,
    PADDED,
    PEERS,
    VLLM_NAME,
    Contestants,
    Part,
    Scenario,
    agreement,
    neighbours,
    output_rate,
    p99_between_tokens,
    run_busy,
    run_scenario,
    scenarios,
    step_ms,
    stream_jobs,
    target_report,
    target_share,
)
from paged_client.cli import main
from tests.support.benchmark_runs import run_of
from tests.support.waiting import until

# --- cpu scenarios ----------------------------------------------------------------------------------------------------


def test_permuted_tokens_keep_shared_prefixes():
    first, second = permute_tokens(4, [Job([1, 2, 3], 5), Job([1, 2, 4], 6)], 50)
    assert first.prompt[:2] == second.prompt[:2] != [1, 2]
    assert first.prompt[2] != second.prompt[2]


def test_step_time_needs_all_sequences_decoding():
    stamps = [[1.0, 2.0, 3.0, 7.0, 11.0, 12.0], [3.0, 7.0, 11.0, 15.0, 16.0, 17.0]]
    assert step_ms(Run(17.0, 2, stamps), []) == 4000.0
    with pytest.raises(ValueError, match="no step in which all 2 sequences decode"):
        step_ms(Run(4.0, 2, [[1.0, 2.0], [3.0, 4.0]]), [])


def test_scenarios_and_their_targets():
    found = {one.name: one for one in scenarios(1000, 2048, 8.0, quick=False)}
    assert found[DECODE].target == 18.0
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


# --- cpu contestants --------------------------------------------------------------------------------------------------


def test_absent_and_failed_peers_are_reported():
    def fails(jobs):
        raise RuntimeError("out of memory\nand more")

    jobs = [Job([1, 2], 2), Job([3], 1)]
    contestants = Contestants({OURS: lambda jobs: run_of([1, 2], [3]), VLLM_NAME: fails}, {"another": "no wheel"})
    scenario = Scenario("words", jobs, output_rate, "tokens/s", {VLLM_NAME: 1.3, "another": 2.0})
    records = {one.name: one for one in run_scenario(scenario, contestants, 10, rounds=2, exact=True)}
    assert records["words"].value == 3 and records["words"].peers == {}
    theirs, another = records[f"words: times {VLLM_NAME}"], records["words: times another"]
    assert (theirs.value, theirs.unit, theirs.target) == (None, "not measured: RuntimeError: out of memory", 1.3)
    assert (another.value, another.unit, another.target) == (None, "not measured: no wheel", 2.0)


def paced(seconds):
    """A contestant that takes so long for each token of one request."""
    return lambda jobs: Run(seconds * 72, 1, [[seconds * (64 + at) for at in range(jobs[0].output)]])


def test_slow_peers_are_left_out_after_a_probe():
    contestants = Contestants({OURS: paced(1.0), "fast": paced(0.01), "slow": paced(0.5)})
    contestants.probe()
    assert list(contestants.available) == [OURS, "fast"]
    assert contestants.absent == {"slow": "a request of 64 prompt and 8 output tokens took 36 s; the limit is 20 s"}


@pytest.mark.parametrize(
    ("seconds", "most", "left", "reason"),
    [
        (1000.0, 1000.0, [OURS, "fast", "medium"], None),
        (1000.0, 20.0, [OURS, "fast"], "a run would take about 30 s; the limit is 20 s"),
        (60.0, 1000.0, [OURS, "fast"], "a round would take about 66 s; 60 s of --minutes are left for them"),
        (1.0, 1000.0, [OURS], "a round would take about 66 s; 1 s of --minutes are left for them"),
    ],
)
def test_slowest_peers_are_left_out_of_what_takes_too_long(seconds, most, left, reason):
    contestants = Contestants({OURS: paced(0.1), "fast": paced(0.02), "medium": paced(0.1), "other": paced(0.01)})
    contestants.probe()
    # 100 prompt tokens, 100 output tokens and 100 steps, each at the pace of the probe
    part = Part("words", [Job([1] * 100, 100)], [OURS, "fast", "medium"], 1, 1)
    assert contestants.round_seconds(part) == pytest.approx(66)
    kept = contestants.affordable(part, seconds, most)
    assert list(kept.available) == left
    assert kept.absent.get("medium") == reason


def test_threads_of_engines_are_limited_until_the_benchmark_ends(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with limited_threads(3), limited_threads(2):
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")
    with pytest.raises(RuntimeError), limited_threads(3):
        raise RuntimeError
    assert torch.get_num_threads() == before
    assert "OMP_NUM_THREADS" not in os.environ


# --- cpu --------------------------------------------------------------------------------------------------------------


def test_run_without_steady_step_is_reported():
    contestants = Contestants({who: lambda jobs: run_of([1]) for who in (OURS, VLLM_NAME)})
    scenario = Scenario("words", [Job([1], 1)], step_ms, "ms", {VLLM_NAME: 1.3}, 28.0)
    records = {one.name: one for one in run_scenario(scenario, contestants, 10, rounds=1, exact=False)}
    why = "NoSteadyStep: no step in which all 1 sequences decode"
    assert (records["words"].unit, records["words"].target) == (f"not measured: {why}", 28.0)
    assert records[f"words: times {VLLM_NAME}"].unit.startswith("not measured: ")


@pytest.mark.parametrize(("figure", "unit"), [(output_rate, "tokens/s"), (step_ms, "ms")])
def test_ratios_above_one_are_in_our_favour(figure, unit):
    contestants = Contestants(
        {OURS: lambda jobs: run_of([1, 2, 3]), VLLM_NAME: lambda jobs: run_of([1, 2, 4], gap=2.0)}
    )
    scenario = Scenario("words", [Job([1], 3)], figure, unit, {VLLM_NAME: 1.3})
    records = {one.name: one for one in run_scenario(scenario, contestants, 10, rounds=3, exact=False)}
    paired = records[f"words: times {VLLM_NAME}"]
    assert (paired.value, dict(paired.peers)) == (2.0, {"p10": 2.0, "p90": 2.0})
    same = records[f"words: same as {VLLM_NAME}"]
    assert (same.value, same.target, dict(same.peers)) == (0.0, None, {"tokens before they differ, median": 2})


def test_each_round_has_new_tokens_for_all_contestants():
    asked = {OURS: [], VLLM_NAME: []}

    def contestant(who):
        return lambda jobs: asked[who].append([job.prompt for job in jobs]) or run_of([1])

    contestants = Contestants({who: contestant(who) for who in asked})
    scenario = Scenario("words", [Job([1, 2, 1], 1)], output_rate, "tokens/s", {VLLM_NAME: None})
    list(run_scenario(scenario, contestants, 50, 3, exact=False))
    assert asked[OURS] == asked[VLLM_NAME]
    assert len({tuple(prompt) for (prompt,) in asked[OURS]}) == 3


def test_exact_agreement_has_a_target():
    exact = agreement("same", [run_of([1, 2], [3])], [run_of([1, 2], [3])], exact=True)
    assert (exact.value, exact.target, dict(exact.peers)) == (100.0, 100.0, {})


@pytest.mark.nightly
def test_cpu_benchmark(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--dtype", "float32", "--peers", "generate", "--threads", "1"]
    assert main(["bench", "cpu", *arguments, "--quick", "--json", str(file)]) == 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    records = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    assert records[f"{DECODE}: times {VLLM_NAME}"]["unit"] == "not measured: not among --peers (generate)"
    assert records[f"{DECODE}: same as {PADDED}"]["value"] == 100
    assert records[f"{DECODE}: times {PADDED}"]["target"] == 2.5
    share = records[f"{DECODE}: share of the memory bandwidth"]
    assert all(0 < figure < 120 for figure in (share["value"], share["peers"][PADDED]))
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
        (["--level", "sse9"], "'sse9': must be one of"),
        (["--minutes", "0"], "'0': must be a number above 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "cpu", *arguments])
    assert message in capsys.readouterr().err


# --- cpu busy ---------------------------------------------------------------------------------------------------------


def expected(nice):
    """The nice value of a neighbour, which is added to that of this process."""
    return min(19, os.nice(0) + nice)


def nice_values():
    """The nice values of the spinning processes that this process has started."""
    until(lambda: None not in _nice_values(), "the start of the neighbours")
    return _nice_values()


def _nice_values():
    """The nice value of each, or None while it starts: it is other programs first, and has no command line in exec."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            with open(f"{entry.path}/cmdline") as line, open(f"{entry.path}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
                command = line.read()
                if int(fields[1]) != os.getpid() or fields[0] == "Z":
                    continue
                if not command or command.startswith("nice\0") or str(LEADER) in command:
                    found.append(None)
                elif cpu.SPIN in command:
                    found.append(int(fields[16]))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 1), (4, 2)])
def test_one_process_spins_per_two_cores(monkeypatch, cores, count):
    monkeypatch.setattr(cpu, "usable_cores", lambda: cores)
    with neighbours(19):
        assert nice_values() == [19] * count
    assert not nice_values()
    with neighbours(None):
        assert not nice_values()


def test_quick_run_has_one_stream():
    assert list(stream_jobs(50, 4096, quick=True)) == ["1 stream"]
    assert [len(jobs) for jobs in stream_jobs(50, 4096, quick=False).values()] == [1, 32]


def test_every_target_has_a_record(monkeypatch):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 2)
    neighbours = Counter()

    def fast(jobs):
        neighbours[tuple(nice_values())] += 1
        return run_of([1, 2, 3])

    def slow(jobs):
        return run_of([1, 2, 3], gap=4.0)

    def failing(jobs):
        raise ValueError("no room")

    contestants = Contestants({OURS: fast, "slow": slow, "failing": failing})
    records = {one.name: one for one in run_busy(contestants, "words", [Job([1], 3)], 10, rounds=2)}
    assert records["words, busy neighbour: share of idle"].value == 1.0
    best = records["words, busy neighbour: times slow, the best peer"]
    assert best.value > 1
    latency = records["words, busy neighbour: p99 between tokens"]
    assert (latency.value, target_share(latency)) == (1.0, 4.0)
    assert set(records["words, idle"].peers) == {"slow"}
    assert contestants.absent["failing"] == "ValueError: no room"
    assert neighbours == {(): 2, (expected(0),): 2, (19,): 2}


def test_p99_is_that_of_all_gaps():
    assert p99_between_tokens([run_of([1, 2, 3]), run_of([1, 2], gap=5.0)]) == 5.0


def test_every_run_has_other_tokens(monkeypatch):
    monkeypatch.setattr(cpu, "usable_cores", lambda: 1)
    prompts = []

    def recorded(jobs):
        prompts.append(tuple(jobs[0].prompt))
        return run_of([1, 2, 3])

    list(run_busy(Contestants({OURS: recorded}), "words", [Job(list(range(20)), 3)], 1000, rounds=3))
    assert len(set(prompts)) == len(prompts) == 9


# --- cpu report -------------------------------------------------------------------------------------------------------


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
