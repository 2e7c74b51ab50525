"""Measure the engine behind a tritonserver: its throughput relative to the engine alone, and latencies under load.

Load comes from perf_analyzer, with figures computed from the timestamps that it exports, and from our own load
generator (client/paged_client/load.py), which uses less CPU time. If the two differ, perf_analyzer was the bottleneck.
Tokens that accumulate for a stream are sent as one response, so the time between responses is at least that between
tokens. The null model is an engine whose forward pass computes nothing; scheduler, sampler, detokenizer, responder and
server are the real ones.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly, assemble
from paged_bench._report import (
    Record,
    Records,
    alternate,
    arguments,
    count,
    not_measured,
    parser,
    publish,
    rate,
    ratio,
)
from paged_bench._server_load import (
    AnalyzerError,
    LoadResult,
    TextWorkload,
    busy_cores,
    run_lean_client,
    run_perf_analyzer,
    text_workload,
    wait_until_populated,
)
from paged_bench._workload import NULL, WORKLOADS, Job, model_names, model_options, workload
from paged_bench.engine import run_paged
from paged_client.serving.server_files import perf_analyzer
from paged_client.serving.tritonserver import TritonServer

IN_PROCESS, LEAN, ANALYZER = "in process", "server, lean client", "server, perf_analyzer"
NO_ANALYZER = "perf_analyzer cannot run here"


def compare(
    what: str,
    assembly: Assembly,
    server: TritonServer,
    work: TextWorkload,
    rounds: int,
    target: float | None,
    ratio_target: float,
) -> list[Record]:
    """Run all requests at once, alternately in process and through the server.

    Before that the server answers them once, because its files and libraries are not in memory yet, and the pages of
    its KV cache are populated.
    """
    num_requests = len(work.jobs)
    run_lean_client(server, work, num_requests)
    wait_until_populated(server)
    loads: dict[str, list[LoadResult]] = {LEAN: [], ANALYZER: []}
    runs: dict[str, Callable[[], LoadResult]] = {LEAN: lambda: run_lean_client(server, work, num_requests)}
    if perf_analyzer():
        runs[ANALYZER] = lambda: run_perf_analyzer(server, work, "--concurrency-range", str(num_requests))
    failed = {} if ANALYZER in runs else {ANALYZER: NO_ANALYZER}

    def timed(name: str) -> float:
        try:
            loads[name].append(runs[name]())
        except AnalyzerError as error:  # does not affect the figures of the others
            failed[name] = str(error)
            return math.nan
        return work.tokens / loads[name][-1].seconds

    contestants = {IN_PROCESS: lambda: work.tokens / run_paged(assembly, work.jobs).seconds}
    figures = alternate(contestants | {name: partial(timed, name) for name in runs}, rounds)
    in_process = figures.pop(IN_PROCESS)
    records = [Record(f"output_throughput {what} ({IN_PROCESS})", statistics.median(in_process), "tokens/s")]
    for name, values in figures.items():
        if name in failed:
            continue
        records += (
            replace(record, value=statistics.median(values), target=target)
            if record.name.startswith("output_throughput")
            else record
            for record in loads[name][-1].records(f"{what} ({name})")
        )
        records.append(ratio(f"server / in process {what} ({name})", values, in_process, ratio_target, 1.0))
    return records + [not_measured(f"output_throughput {what} ({name})", why) for name, why in failed.items()]


def sweep(
    server: TritonServer, work: TextWorkload, concurrencies: Sequence[int], rates: Sequence[float]
) -> Iterator[Record]:
    """Measure with perf_analyzer at several concurrencies and request rates."""
    if perf_analyzer() is None:
        yield not_measured("sweeps", NO_ANALYZER)
        return
    points = [(f"concurrency {one}", ["--concurrency-range", str(one)]) for one in concurrencies]
    poisson = ["--request-distribution", "poisson"]
    points += [(f"rate {one:g}/s", ["--request-rate-range", f"{one:g}", *poisson]) for one in rates]
    for name, flags in points:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield from run_perf_analyzer(server, work, *flags).records(name)
        except AnalyzerError as error:
            yield not_measured(f"output_throughput {name}", str(error))


def null_model(tokenizer: str, streams: int, tokens: int, rounds: int) -> Iterator[Record]:
    """Measure the capacity of the path from the scheduler to the client, with a model that computes nothing."""
    options = model_options(NULL) | {"tokenizer": tokenizer, "max_num_seqs": streams, "enable_prefix_caching": False}
    options |= {"max_num_batched_tokens": max(2048, streams), "num_gpu_blocks_override": streams * (tokens // 16 + 4)}
    assembly = assemble(EngineConfig.from_options(options))
    work = text_workload([Job([0] * 16, tokens)] * streams, assembly.loaded.tokenizer)
    with TritonServer(options.pop("model"), options, engine_only=True) as server:
        yield from compare(NULL, assembly, server, work, rounds, 50_000.0, 0.5)
        clients = {LEAN: partial(run_lean_client, server, work, streams)}
        if perf_analyzer():
            clients[ANALYZER] = partial(run_perf_analyzer, server, work, "--concurrency-range", str(streams))
        for name, run in clients.items():
            try:
                cores = busy_cores(server, run)
            except AnalyzerError as error:
                yield not_measured(f"cores busy {NULL} ({name})", str(error))
                continue
            yield Record(f"cores busy {NULL} ({name})", sum(cores.values()), "cores", limit=os.cpu_count(), peers=cores)


def served(args: Namespace, num_requests: int) -> Iterator[Record]:
    """Measure a real model, or one with its shape and random weights."""
    on_gpu = torch.cuda.is_available()
    options = model_options(args.model or ("Qwen3-0.6B" if on_gpu else "demo"))
    options |= {
        "dtype": "auto" if on_gpu else "float32",
        "max_num_seqs": max(num_requests, 16),
        "enable_prefix_caching": False,
    }
    options |= {"max_num_batched_tokens": 8192 if on_gpu else max(512, num_requests)}
    if not on_gpu:
        options["num_gpu_blocks_override"] = 35 * max(num_requests, 16)
    # The utilization of each includes the memory of the other: the first may use 40% of a GPU, the second up to 80%.
    assembly = assemble(EngineConfig.from_options(options | {"gpu_memory_utilization": 0.4}))
    tokenizer, limit = assembly.loaded.tokenizer, assembly.limits.max_model_len - 8
    work = text_workload(workload(args.workload, num_requests, len(tokenizer), limit), tokenizer)
    options |= {"gpu_memory_utilization": 0.8}
    with TritonServer(options.pop("model"), options, engine_only=True) as server:
        yield from compare(args.workload, assembly, server, work, args.rounds, None, 0.97)
        concurrencies = args.concurrency or [one for one in (1, 4, 16, 64, 256) if one < num_requests]
        yield from sweep(server, work, concurrencies, args.rate or ([] if args.quick else [0.5, 1]))


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"requests": 2, "rounds": 1, "streams": 64, "tokens": 64})
    on_gpu = torch.cuda.is_available()
    num_requests = args.requests or (256 if on_gpu else 16)
    args.workload = args.workload or ("sharegpt" if on_gpu else "mixed")
    records = Records(args)
    if not args.null:
        records += served(args, num_requests)
    tokenizer = args.tokenizer or model_options("demo")["model"]
    records += null_model(tokenizer, args.streams, args.tokens, args.rounds)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("server", __doc__)
    add = made.add_argument
    shapes = ", ".join(model_names())
    add(
        "--model",
        help=f"Hugging Face model directory, 'demo', or a shape with random weights: {shapes}"
        " (default: demo on a CPU, Qwen3-0.6B on a GPU)",
    )
    add(
        "--workload",
        choices=[name for name in WORKLOADS if name not in ("n4", "beam4")],
        help="lengths of prompts and outputs (default: mixed on a CPU, sharegpt on a GPU)",
    )
    add("--requests", type=count, metavar="N", help="number of requests (default: 16 on a CPU, 256 on a GPU)")
    add("--concurrency", type=count, action="append", metavar="N", help="a concurrency to measure; may be repeated")
    add("--rate", type=rate, action="append", metavar="X", help="a Poisson request rate per second; may be repeated")
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    add("--null", action="store_true", help="measure the null model only")
    add("--streams", type=count, default=256, metavar="N", help="streams of the null model (default: 256)")
    add("--tokens", type=count, default=256, metavar="N", help="output tokens of each of these streams (default: 256)")
    add("--tokenizer", metavar="DIR", help="tokenizer of the null model (default: the demo model's)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, prefix, unit in (
        (left, "output_throughput ", "output tokens per second"),
        (right, "time to first response p50 ", "median time to first response, ms"),
    ):
        shown = [one for one in records if one.name.startswith(prefix) and one.value is not None][::-1]
        names = [one.name.removeprefix(prefix) for one in shown]
        bars = axes.barh(names, [one.value for one in shown], color="#76b900")
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=7)
        axes.set_title(unit, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
