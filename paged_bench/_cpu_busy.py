"""Throughput while other processes use the cores: the "busy neighbour" of `paged bench cpu`."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

from paged_backend.utils.machine import usable_cores
from paged_bench._cpu_contestants import Contestants, first_line
from paged_bench._cpu_scenarios import output_rate, permute_tokens
from paged_bench._report import Record, alternate, not_measured, percentile, ratio
from paged_bench._workload import Job, Run
from paged_bench.engine import OURS

CONDITIONS: Mapping[str, int | None] = {  # nice values of the neighbours; None: no neighbour
    "idle": None,
    "busy neighbour": 0,
    "busy neighbour at nice 19": 19,
}
IDLE = "idle"
MIN_SHARE = 0.6  # of our own idle throughput
MIN_SPEEDUP = 2.0  # over the best peer under the same conditions
MAX_LATENCY = 4.0  # times the idle p99 between tokens
LATENCY_UNIT = "times idle"
SPIN = "while True: pass"


@contextmanager
def neighbours(nice: int | None) -> Iterator[None]:
    """Run one spinning process per two usable cores, at least one, with this nice value; None starts none."""
    count = 0 if nice is None else max(1, usable_cores() // 2)
    command = ["nice", "-n", str(nice), sys.executable, "-c", SPIN]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stream_jobs(vocab_size: int, limit: int, quick: bool) -> Mapping[str, list[Job]]:
    """Return the requests of each workload: streams that start together."""
    rng, output = random.Random(3), 16 if quick else 64
    prompt = min(144, limit - output)

    def streams(count: int) -> list[Job]:
        return [Job([rng.randrange(vocab_size) for _ in range(prompt)], output) for _ in range(count)]

    return {"1 stream": streams(1)} | ({} if quick else {"32 streams": streams(32)})


def measure_busy(
    contestants: Contestants, workloads: Mapping[str, list[Job]], vocab_size: int, rounds: int
) -> list[Record]:
    """Run every contestant once per round under each condition. A contestant that fails is left out."""
    records: list[Record] = []
    for workload, jobs in workloads.items():
        runs = _run(contestants, workload, jobs, vocab_size, rounds)
        for condition in CONDITIONS:
            records += _records(f"{workload}, {condition}", condition, runs, jobs)
    return records


def _run(
    contestants: Contestants, workload: str, jobs: Sequence[Job], vocab_size: int, rounds: int
) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each contestant under each condition."""
    runs: dict[tuple[str, str], list[Run]] = {}
    counts: Counter[str] = Counter()  # of the runs of a contestant; every one has other tokens, which no cache holds

    def timed(name: str, condition: str) -> float:
        made = runs.setdefault((name, condition), [])
        counts[name] += 1
        if name not in contestants.available:
            return math.nan
        try:
            with neighbours(CONDITIONS[condition]):
                made.append(contestants.available[name](permute_tokens(counts[name], jobs, vocab_size)))
        except Exception as error:
            if name == OURS:
                raise
            contestants.leave_out([name], first_line(error))
        return output_rate(made[-1], jobs) if name in contestants.available else math.nan

    pairs = [(name, condition) for name in contestants.available for condition in CONDITIONS]
    alternate(
        {f"{name} ({workload}, {condition})": partial(timed, name, condition) for name, condition in pairs}, rounds
    )
    return {(name, condition): runs[name, condition] for name, condition in pairs if name in contestants.available}


def _records(
    label: str, condition: str, runs: Mapping[tuple[str, str], Sequence[Run]], jobs: Sequence[Job]
) -> Iterator[Record]:
    rates = {pair: [output_rate(run, jobs) for run in made] for pair, made in runs.items()}
    ours = rates[OURS, condition]
    peers = {name: statistics.median(rates[name, at]) for name, at in rates if at == condition and name != OURS}
    yield Record(label, statistics.median(ours), "tokens/s", peers=peers)
    if condition == IDLE:
        return
    yield ratio(f"{label}: share of idle", ours, rates[OURS, IDLE], MIN_SHARE)
    if peers:
        best = max(peers, key=lambda name: peers[name])
        yield ratio(f"{label}: times {best}, the best peer", ours, rates[best, condition], MIN_SPEEDUP)
    else:
        yield not_measured(f"{label}: times the best peer", "no peer")
    slower = p99_between_tokens(runs[OURS, condition]) / p99_between_tokens(runs[OURS, IDLE])
    yield Record(f"{label}: p99 between tokens", slower, LATENCY_UNIT, MAX_LATENCY)


def p99_between_tokens(runs: Sequence[Run]) -> float:
    """Return the 99th percentile of the time between tokens of a sequence, in seconds."""
    return percentile([later - earlier for run in runs for one in run.stamps for earlier, later in pairwise(one)], 0.99)
