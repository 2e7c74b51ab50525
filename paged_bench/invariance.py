"""Measure what `batch_invariant` costs: the same requests in two engines of this project, one with the option.

The engines run alternately. Throughput is also given per second of CPU time of this process, which other processes on
the machine influence less.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial

from paged_backend.engine.assembly import Assembly
from paged_bench._engine import Job, load, model_options, run_paged, workload, workload_name
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, figures, model_option, ratio, rounds_option

DEFAULT, INVARIANT = "default", "batch_invariant"
TARGET = 0.95  # throughput with the option, relative to without it
WORKLOADS = ["16x32/64", "8x512/1", "2x2048/1"]  # decode, and prompts of two lengths


def rates(assembly: Assembly, jobs: Sequence[Job]) -> tuple[float, float]:
    """Return tokens per second, and per second of CPU time."""
    tokens, before = sum(len(job.prompt) + job.output for job in jobs), time.process_time()
    seconds = run_paged(assembly, jobs).seconds
    return tokens / seconds, tokens / (time.process_time() - before)


def measure(args: Namespace) -> Iterator[Record]:
    options = model_options(args.model) | {"dtype": args.dtype, "max_num_seqs": 16, "num_gpu_blocks_override": 600}
    options |= {"enable_prefix_caching": False}
    engines = {name: load({**options, "batch_invariant": name == INVARIANT}) for name in (DEFAULT, INVARIANT)}
    limits = engines[DEFAULT].limits
    for name in args.workload:
        jobs = workload(name, 16, limits.vocab_size, limits.max_model_len)
        contestants = {who: partial(rates, assembly, jobs) for who, assembly in engines.items()}
        contest = alternate(contestants, args.rounds, lambda run: run[0], warm_up=True)
        yield from contest.records(f"{name}, {{}}", "tokens/s")
        yield contest.ratio(f"{name}, {INVARIANT} / {DEFAULT}", INVARIANT, DEFAULT, TARGET)
        cpu = {who: [run[1] for run in runs] for who, runs in contest.runs.items()}
        yield ratio(f"{name}, {INVARIANT} / {DEFAULT}, CPU time", cpu[INVARIANT], cpu[DEFAULT], TARGET)
    for assembly in engines.values():
        assembly.close()


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    ratios = figures(records, f"(.*, {INVARIANT} / {DEFAULT}.*)")
    shown = {name.replace(f", {INVARIANT} / {DEFAULT}", ""): value for name, value in ratios.items()}
    yield Bars("throughput with batch_invariant, relative to that without", shown, line=1.0)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(help="Hugging Face model directory, or a shape as in `engine`"),
        Option("--dtype", "data type of the model", "bfloat16"),
        Option("--workload", "workload as in `engine`", WORKLOADS, many=True, type=workload_name, metavar="NAME"),
        rounds_option(5),
    ),
    quick={"rounds": 1},
)
