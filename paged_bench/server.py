"""Measure the engine behind a tritonserver: its throughput relative to the engine alone, and latencies under load.

Load comes from perf_analyzer, with figures computed from the timestamps that it exports, and from our own load
generator (client/paged_client/load.py), which uses less CPU time. If the two differ, perf_analyzer was the bottleneck.
Tokens that accumulate for a stream are sent as one response, so the time between responses is at least the time between
tokens. The null model is an engine whose forward pass computes nothing; scheduler, sampler, detokenizer, responder and
server are the real ones.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from paged_backend.engine.assembly import Assembly
from paged_bench._engine import NULL, WORKLOADS, Job, Run, load, model_options, run_paged, shape_option, workload
from paged_bench._harness import (
    Bars,
    Benchmark,
    Option,
    Record,
    alternate,
    count,
    figures,
    not_measured,
    rate,
    rounds_option,
)
from paged_bench._servers import (
    AnalyzerError,
    LoadResult,
    TextWorkload,
    busy_cores,
    run_lean_client,
    run_perf_analyzer,
    text_workload,
)
from paged_client.serving.server_files import perf_analyzer
from paged_client.serving.tritonserver import TritonServer

IN_PROCESS, LEAN, ANALYZER = "in process", "server, lean client", "server, perf_analyzer"
NO_ANALYZER = "perf_analyzer cannot run here"


def clients(server: TritonServer, work: TextWorkload) -> dict[str, Callable[[], LoadResult]]:
    """Return functions that send all requests at once, by client."""
    senders: dict[str, Callable[[], LoadResult]] = {LEAN: partial(run_lean_client, server, work, len(work.jobs))}
    if perf_analyzer():
        senders[ANALYZER] = partial(run_perf_analyzer, server, work, "--concurrency-range", str(len(work.jobs)))
    return senders


def compare(
    what: str,
    assembly: Assembly,
    server: TritonServer,
    work: TextWorkload,
    rounds: int,
    target: float | None,
    ratio_target: float,
) -> Iterator[Record]:
    """Run all requests at once, alternately in process and through the server.

    Before that the server answers them once, because its files and libraries are not in memory yet.
    """
    run_lean_client(server, work, len(work.jobs))
    contestants: dict[str, Callable[[], Run | LoadResult]] = {IN_PROCESS: partial(run_paged, assembly, work.jobs)}
    contestants |= clients(server, work)
    contest = alternate(contestants, rounds, lambda run: work.tokens / run.seconds, may_fail=[ANALYZER])
    yield Record(f"output_throughput {what} ({IN_PROCESS})", contest.medians[IN_PROCESS], "tokens/s")
    for name, runs in contest.runs.items():
        if isinstance(last := runs[-1], LoadResult):
            throughput, *others = last.records(f"{what} ({name})")
            yield replace(throughput, value=contest.medians[name], target=target)
            yield from others
            yield contest.ratio(f"server / in process {what} ({name})", name, IN_PROCESS, ratio_target, 1.0)
    failed = contest.failed if ANALYZER in contestants else {ANALYZER: NO_ANALYZER}
    yield from (not_measured(f"output_throughput {what} ({name})", why) for name, why in failed.items())


def sweep(
    server: TritonServer, work: TextWorkload, concurrencies: Sequence[int], rates: Sequence[float]
) -> Iterator[Record]:
    """Measure with perf_analyzer at several concurrencies and request rates."""
    if perf_analyzer() is None:
        yield not_measured("sweeps", NO_ANALYZER)
        return
    points = {f"concurrency {n}": ["--concurrency-range", str(n)] for n in concurrencies}
    poisson = ["--request-distribution", "poisson"]
    points |= {f"rate {x:g}/s": ["--request-rate-range", f"{x:g}", *poisson] for x in rates}
    for name, flags in points.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield from run_perf_analyzer(server, work, *flags).records(name)
        except AnalyzerError as error:
            yield not_measured(f"output_throughput {name}", str(error))


def null_model(streams: int, tokens: int, rounds: int) -> Iterator[Record]:
    """Measure the capacity of the path from the scheduler to the client, with a model that computes nothing."""
    options = model_options(NULL) | {"max_num_seqs": streams, "enable_prefix_caching": False}
    options |= {"max_num_batched_tokens": max(2048, streams), "num_gpu_blocks_override": streams * (tokens // 16 + 4)}
    assembly = load(options)
    work = text_workload([Job([0] * 16, tokens)] * streams, assembly.loaded.tokenizer)
    with TritonServer(options.pop("model"), options, engine_only=True) as server:
        yield from compare(NULL, assembly, server, work, rounds, 50_000.0, 0.5)
        for name, run in clients(server, work).items():
            try:
                cores = busy_cores(server, run)
            except AnalyzerError as error:
                yield not_measured(f"cores busy {NULL} ({name})", str(error))
                continue
            yield Record(f"cores busy {NULL} ({name})", sum(cores.values()), "cores", limit=os.cpu_count(), peers=cores)


def served(args: Namespace, on_gpu: bool) -> Iterator[Record]:
    """Measure a real model, or one with its shape and random weights."""
    num_requests = args.requests or (256 if on_gpu else 16)
    name = args.workload or ("sharegpt" if on_gpu else "mixed")
    options = model_options(args.model or ("Qwen3-0.6B" if on_gpu else "demo")) | {
        "dtype": "auto" if on_gpu else "float32",
        "max_num_seqs": max(num_requests, 16),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 8192 if on_gpu else max(512, num_requests),
    }
    if not on_gpu:
        options["num_gpu_blocks_override"] = 35 * max(num_requests, 16)
    # The utilization of each includes the memory of the other: the first may use 40% of a GPU, the second up to 80%.
    assembly = load(options | {"gpu_memory_utilization": 0.4})
    tokenizer, limit = assembly.loaded.tokenizer, assembly.limits.max_model_len - 8
    work = text_workload(workload(name, num_requests, len(tokenizer), limit), tokenizer)
    options |= {"gpu_memory_utilization": 0.8}
    with TritonServer(options.pop("model"), options, engine_only=True) as server:
        yield from compare(name, assembly, server, work, args.rounds, None, 0.97)
        concurrencies = args.concurrency or [n for n in (1, 4, 16, 64, 256) if n < num_requests]
        yield from sweep(server, work, concurrencies, args.rate or ([] if args.quick else [0.5, 1]))


def measure(args: Namespace) -> Iterator[Record]:
    if not args.null:
        yield from served(args, torch.cuda.is_available())
    yield from null_model(args.streams, args.tokens, args.rounds)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    yield Bars("output tokens per second", figures(records, "output_throughput (.*)"))
    yield Bars("median time to first response, ms", figures(records, "time to first response p50 (.*)"))


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option(None),
        Option(
            "--workload",
            "lengths of prompts and outputs (default: mixed on a CPU, sharegpt on a GPU)",
            choices=[name for name in WORKLOADS if name not in ("n4", "beam4")],
        ),
        Option("--requests", "number of requests (default: 16 on a CPU, 256 on a GPU)", type=count),
        Option("--concurrency", "a concurrency to measure", type=count, many=True),
        Option("--rate", "a Poisson request rate per second", type=rate, many=True),
        rounds_option(5),
        Option("--null", "measure the null model only", action="store_true"),
        Option("--streams", "streams of the null model", 256),
        Option("--tokens", "output tokens of each of these streams", 256),
    ),
    quick={"requests": 2, "rounds": 1, "streams": 64, "tokens": 64},
)
