"""Measure what `batch_invariant` costs: the same requests in two engines of this project, one with the option.

The engines run alternately. Throughput is also given per second of CPU time of this process, which other processes on
the machine influence less.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_bench import _chart
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish, ratio
from paged_bench._workload import Job, model_options, workload, workload_name
from paged_bench.engine import run_paged

DEFAULT, INVARIANT = "default", "batch_invariant"
TARGET = 0.95  # throughput with the option, relative to that without
WORKLOADS = ("16x32/64", "8x512/1", "2x2048/1")  # decode, and prompts of two lengths


def measure(options: Mapping[str, Any], names: Sequence[str], rounds: int) -> Iterator[Record]:
    """Measure both engines with each workload."""
    engines = {
        one: assemble(EngineConfig.from_options({**options, "batch_invariant": one == INVARIANT}))
        for one in (DEFAULT, INVARIANT)
    }
    limits = engines[DEFAULT].limits
    for name in names:
        jobs = workload(name, 16, limits.vocab_size, limits.max_model_len)
        cpu: dict[str, list[float]] = {one: [] for one in engines}

        def contestant(one: str, jobs: list[Job] = jobs, cpu: dict[str, list[float]] = cpu) -> Callable[[], float]:
            def once() -> float:
                tokens, before = sum(len(job.prompt) + job.output for job in jobs), time.process_time()
                seconds = run_paged(engines[one], jobs).seconds
                cpu[one].append(tokens / (time.process_time() - before))
                return tokens / seconds

            return once

        runs = {one: contestant(one) for one in engines}
        for run in runs.values():  # the first round does not count
            run()
        figures = alternate(runs, rounds)
        cpu = {one: values[1:] for one, values in cpu.items()}
        yield from (Record(f"{name}, {one}", statistics.median(values), "tokens/s") for one, values in figures.items())
        yield ratio(f"{name}, {INVARIANT} / {DEFAULT}", figures[INVARIANT], figures[DEFAULT], TARGET)
        yield ratio(f"{name}, {INVARIANT} / {DEFAULT}, CPU time", cpu[INVARIANT], cpu[DEFAULT], TARGET)
    for assembly in engines.values():
        assembly.close()


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 1})
    options = model_options(args.model) | {
        "dtype": args.dtype,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 600,
        "enable_prefix_caching": False,
    }
    records = Records(args, measure(options, args.workload or WORKLOADS, args.rounds))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("invariance", __doc__)
    made.add_argument("--model", default="demo", help="Hugging Face model directory, or a shape as in `engine`")
    made.add_argument("--dtype", default="bfloat16", help="data type of the model (default: bfloat16)")
    made.add_argument(
        "--workload",
        action="append",
        type=workload_name,
        metavar="NAME",
        help=f"workload as in `engine`; may be repeated (default: {', '.join(WORKLOADS)})",
    )
    made.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds of both engines (default: 5)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    ratios = {
        one.name.replace(f", {INVARIANT} / {DEFAULT}", ""): one.value or 0.0 for one in records if one.unit == "x"
    }
    figure, (axes,) = _chart.panels(1, len(ratios))
    _chart.bars(axes, ratios, "throughput with batch_invariant, relative to that without")
    axes.axvline(1.0, color="#606060", linewidth=0.8)
    _chart.save(figure, file, caption)
