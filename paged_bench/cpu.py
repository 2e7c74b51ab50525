"""Compare the engine on a CPU with vLLM, llama.cpp and transformers, and profile its decode step.

The contestants run alternately, one at a time, with the same weights, dtype, threads and KV cache size, and with their
own defaults otherwise. vLLM and llama.cpp run in their own environments, which are created on first use. All requests
ignore the end of sequence, so that all contestants generate the same number of tokens. The outputs of greedy requests
are compared. Prefix caching is on where that is the default (ours and vLLM's), but each round has other tokens, so
that only prefixes shared within a round are found. A decode step is the time between tokens of a sequence while all
sequences decode. Where steps are timed, our engine runs without `target_step_ms`. Ratios above 1 are in our favour.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paged_backend.api.config import EngineConfig
from paged_backend.api.sizes import GIB
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.memory.kv_cache import bytes_per_block
from paged_backend.utils.machine import usable_cores
from paged_bench._cpu_busy import measure_busy, stream_jobs
from paged_bench._cpu_contestants import (
    KV_GIB,
    Contestants,
    first_line,
    gather,
    print_our_settings,
    without_step_target,
)
from paged_bench._cpu_report import draw, target_report
from paged_bench._cpu_scenarios import (
    DECODE,
    LESS_IS_BETTER,
    LLAMA_CPP_PACKED,
    PEERS,
    NoSteadyStep,
    Scenario,
    permute_tokens,
    scenarios,
    step_ms,
)
from paged_bench._report import (
    Record,
    Records,
    alternate,
    arguments,
    count,
    not_measured,
    parser,
    percentile,
    publish,
    rate,
    ratio,
)
from paged_bench._server_load import text_workload
from paged_bench._step_profile import decode_step
from paged_bench._workload import Job, Run, model_options, workload
from paged_bench.engine import OURS, latencies, run_paged
from paged_bench.kernels import measure_machine
from paged_bench.server import compare
from paged_client.serving.tritonserver import TritonServer


def contest(args: Namespace, options: Mapping[str, Any]) -> Iterator[Record]:
    """Measure all scenarios, then profile our decode step once the other engines have ended."""
    config = EngineConfig.from_options(options)
    assembly = assemble(config)
    print_our_settings(config, assembly)
    vocab_size = assembly.loaded.spec.vocab_size
    selected = scenarios(vocab_size, assembly.limits.max_model_len, args.rate, args.quick)
    with ExitStack() as stack:
        contestants = gather(args, config, assembly, stack)
        contestants.warm_up([replace(job, output=4) for job in selected[0].jobs[:2]])
        steady = without_step_target(config, assembly)
        for scenario in selected:
            contestants.available[OURS] = partial(run_paged, steady if scenario.figure is step_ms else assembly)
            yield from measure(scenario, contestants, vocab_size, args.rounds, args.dtype == "float32")
        contestants.available[OURS] = partial(run_paged, assembly)
        streams = stream_jobs(vocab_size, assembly.limits.max_model_len, args.quick)
        yield from measure_busy(contestants, streams, vocab_size, args.rounds)
    yield from profile(steady, next(one.jobs for one in selected if one.name == DECODE), vocab_size, args.quick)
    assembly.close()


def measure(scenario: Scenario, contestants: Contestants, vocab_size: int, rounds: int, exact: bool) -> list[Record]:
    """Run every contestant once per round. With `exact`, all outputs have to be the same."""
    names = [OURS, *(one for one in scenario.ratios if one in contestants.available)]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    failed: dict[str, str] = {}

    def timed(name: str) -> float:
        jobs = permute_tokens(len(runs[name]), scenario.jobs, vocab_size)
        if name in failed:
            return math.nan
        try:
            runs[name].append(contestants.available[name](jobs))
            return scenario.figure(runs[name][-1], jobs)
        except Exception as error:
            if name == OURS and not isinstance(error, NoSteadyStep):
                raise
            failed[name] = first_line(error)
            return math.nan

    figures = alternate({f"{name} ({scenario.name})": partial(timed, name) for name in names}, rounds)
    values = dict(zip(names, figures.values(), strict=True))
    ours = values.pop(OURS)
    if OURS in failed:
        failed = dict.fromkeys(scenario.ratios, f"{OURS}: {failed[OURS]}") | failed
    values = {name: figures for name, figures in values.items() if name not in failed}
    medians = {name: statistics.median(figures) for name, figures in values.items()}
    if OURS in failed:
        record = replace(not_measured(scenario.name, failed[OURS]), target=scenario.target, peers=medians)
    else:
        record = Record(scenario.name, statistics.median(ours), scenario.unit, scenario.target, peers=medians)
    records = [record]
    for name, theirs in values.items():
        pair = (theirs, ours) if scenario.unit in LESS_IS_BETTER else (ours, theirs)
        records.append(ratio(f"{scenario.name}: times {name}", *pair, scenario.ratios[name]))
        if name != LLAMA_CPP_PACKED and all(job.n == 1 for job in scenario.jobs):
            records.append(agreement(f"{scenario.name}: same as {name}", runs[OURS], runs[name], exact))
    if scenario.jobs[-1].arrival:
        for name in (OURS, *values):
            records += latencies(f"{scenario.name} ({name})", runs[name])
    missing = {name: why for name, why in (contestants.absent | failed).items() if name in scenario.ratios}
    return records + [
        replace(not_measured(f"{scenario.name}: times {name}", why), target=scenario.ratios[name])
        for name, why in missing.items()
    ]


def agreement(name: str, ours: Sequence[Run], theirs: Sequence[Run], exact: bool) -> Record:
    """Return the share of requests with the same output, and after how many tokens the others differ."""
    pairs = [
        (one, other)
        for our_run, their_run in zip(ours, theirs, strict=True)
        for one, other in zip(our_run.outputs, their_run.outputs, strict=True)
    ]
    differing = [at for at in (_first_difference(*pair) for pair in pairs) if at is not None]
    peers = {"tokens before they differ, median": statistics.median(differing)} if differing else {}
    share = 100 * (len(pairs) - len(differing)) / len(pairs)
    return Record(name, share, "% of requests", 100.0 if exact else None, 100.0, peers)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def profile(assembly: Assembly, jobs: Sequence[Job], vocab_size: int, quick: bool) -> Iterator[Record]:
    """Measure the parts of our decode step, and how long its memory reads take at the bandwidth of this machine."""
    try:
        parts = decode_step(lambda: run_paged(assembly, permute_tokens(-2, jobs, vocab_size)), len(jobs))
    except ValueError as error:
        yield not_measured(f"{DECODE}: parts", str(error))
    else:
        yield from (Record(f"{DECODE}: {part}", 1e3 * seconds, "ms") for part, seconds in parts.items())
    bandwidth = measure_machine(assembly.device, assembly.loaded.spec.dtype, quick).read
    yield Record("read-only stream", bandwidth / 1e9, "GB/s")
    for name, nbytes in step_bytes(assembly, jobs).items():
        yield Record(f"{DECODE}: least for {name}", 1e3 * nbytes / bandwidth, "ms", peers={"MB": nbytes / 1e6})


def step_bytes(assembly: Assembly, jobs: Sequence[Job]) -> dict[str, int]:
    """Return the bytes that a decode step in the middle of the outputs reads.

    The input embedding does not count: a step reads only one row for each token.
    """
    model, spec = assembly.loaded.model, assembly.loaded.spec
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    excluded = {id(one.weight) for one in (*linears, model.get_input_embeddings())}
    # The engine may hold the weight of a linear layer in another layout, so its size is computed from its shape.
    weights = sum(one.in_features * one.out_features for one in linears) * spec.dtype.itemsize
    weights += sum(one.nbytes for one in model.parameters() if id(one) not in excluded)
    tokens = sum(len(job.prompt) + job.output // 2 for job in jobs)
    kv_bytes = tokens * bytes_per_block(assembly.loaded.layers, 1, spec.kv_dtype)
    return {"weights": weights, "keys and values": kv_bytes}


def through_server(options: Mapping[str, Any], rounds: int) -> Iterator[Record]:
    """Compare the engine in process with perf_analyzer's gRPC streams.

    The prefix cache is off, because rounds repeat the requests.
    """
    name, target, options = "even lengths", 0.95, dict(options) | {"enable_prefix_caching": False}
    assembly = assemble(EngineConfig.from_options(options))
    tokenizer = assembly.loaded.tokenizer
    work = text_workload(workload("even", 32, len(tokenizer), assembly.limits.max_model_len - 8), tokenizer)
    with TritonServer(options.pop("model"), options) as server:
        yield from compare(f"{name} served", assembly, server, work, rounds, None, target)
    assembly.close()


def load_seconds(model: str, rounds: int) -> Record:
    """Measure the time from the start of tritonserver until the model is ready, with the options of `paged serve`."""
    figures = []
    for number in range(rounds):
        print(f"load {number + 1} of {rounds} ...", end=" ", file=sys.stderr, flush=True)
        started = time.perf_counter()
        with TritonServer(model, {"device": "cpu"}):
            figures.append(time.perf_counter() - started)
        print(f"{figures[-1]:.1f} s", file=sys.stderr)
    spread = {"p10": percentile(figures, 0.1), "p90": percentile(figures, 0.9)}
    return Record("load to ready", statistics.median(figures), "s", 10.0, peers=spread)


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 1, "peers": ["generate"]})  # other peers take a minute to load
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # limits the threads of the server
    options = model_options(args.model) | {
        "device": "cpu",
        "dtype": args.dtype,
        "kv_cache_memory_bytes": KV_GIB * GIB,
        "max_num_seqs": 128,
    }
    records = Records(args, contest(args, options))
    if not args.quick:
        records += through_server(options, args.rounds)
        records.append(load_seconds(options["model"], args.rounds))
    publish(records, lambda file, caption: draw(records, file, caption))
    print("\n".join(target_report(records)))
    return 0


def _parser() -> ArgumentParser:
    made = parser("cpu", __doc__)
    add = made.add_argument
    cores = usable_cores()
    add("--model", default="demo", help="Hugging Face model directory (default: demo)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="data type of weights (default: bfloat16)")
    add(
        "--peers",
        type=_peer_names,
        default=list(PEERS),
        metavar="A,B",
        help=f"engines to compare with, of {', '.join(PEERS)} (default: all)",
    )
    add(
        "--rate",
        type=rate,
        default=8.0,
        metavar="X",
        help="rate of requests that arrive over time (default: 8)",
    )
    add(
        "--threads",
        type=count,
        default=cores,
        metavar="N",
        help=f"threads of each engine (default: {cores})",
    )
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    return made


def _peer_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise ArgumentTypeError(f"{unknown[0]!r}: must be one of {', '.join(PEERS)}")
    return names
