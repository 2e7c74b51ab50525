"""Measure throughput and latencies of the engine without a server, and of other engines for the same requests.

All contestants run the same weights (or the same shapes with random weights) with the same dtype on the same device,
and generate the same number of tokens for each request: the end of sequence is ignored. Only requested tokens count.
Time to first token starts at the arrival of a request. Time between tokens is within a sequence.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly, assemble
from paged_bench._engine import (
    OURS,
    WORKLOADS,
    Contestant,
    Job,
    Run,
    blocks_for,
    model_options,
    run_latencies,
    run_paged,
    shape_option,
    workload,
    workload_name,
)
from paged_bench._harness import (
    NO_GPU,
    Bars,
    Benchmark,
    Option,
    Record,
    alternate,
    count,
    not_measured,
    rate,
    rounds_option,
)
from paged_bench._peers import VLLM, Vllm, continuous, load_transformers, one_at_a_time, padded, start_vllm
from paged_kernels.compilation import after_ready

CONTINUOUS, TUNED = "transformers, continuous", "transformers, continuous, tuned"
PADDED, ALONE = "transformers, one padded batch", "transformers, one at a time"
PEERS = ("transformers", "vllm")
CACHED = ("system-prompt",)  # workloads with a prefix cache; in the others, rounds repeat the same prompts
TARGETS = {"nano": 20_000.0}  # output tokens/s of Qwen3-0.6B on an H200
LIMITS = {"nano": 36_500.0}  # limit of its memory bandwidth
PROFILED, PROFILED_STEPS = ("1x128/256", "16x512/256", "64x2048/128"), 32  # workloads, and tokens of each request
MOST_KERNELS = 16  # maximum records of a workload
LONGEST_NAME = 60  # maximum characters of a kernel's name; cuBLAS and PyTorch have names of thousands


# --- contestants ---------------------------------------------------------------------------------------------------


def contestants(
    assembly: Assembly, peer: torch.nn.Module | None, vllm: Vllm | None, name: str, has_arrivals: bool
) -> dict[str, Contestant]:
    """Return the contestants that support a workload and are not disproportionately slow."""
    available: dict[str, Contestant] = {OURS: partial(run_paged, assembly)}
    if vllm and name != "beam4":
        available[VLLM] = vllm.run
    if peer is None:
        return available
    on_gpu = assembly.device.type == "cuda"
    if name != "beam4":  # continuous batching has no beam search
        make = partial(continuous, peer, assembly.scheduler.max_num_batched_tokens, sharing=name in CACHED)
        available[CONTINUOUS] = make(tuned=False)
        if on_gpu:
            available[TUNED] = make(tuned=True)
    if has_arrivals:
        return available
    if on_gpu:  # half of the free memory is left for attention and logits
        available[PADDED] = padded(peer, torch.cuda.mem_get_info(assembly.device)[0] / 2)
    elif name in ("mixed", "alpaca", "n4", "beam4"):
        available[PADDED] = padded(peer)
    if name == "mixed":
        available[ALONE] = one_at_a_time(peer)
    return available


def compare(
    assembly: Assembly, peer: torch.nn.Module | None, vllm: Vllm | None, name: str, jobs: list[Job], rounds: int
) -> Iterator[Record]:
    """Yield all figures of one workload."""
    has_arrivals = jobs[-1].arrival > 0  # the throughput then is the arrival rate, and the latencies matter
    by_name = contestants(assembly, peer, vllm, name, has_arrivals)
    compiled = after_ready.count
    cold = alternate({OURS: partial(by_name[OURS], jobs)}, 1, partial(Run.rate, jobs=jobs), label=f"{{}} ({name})")
    peers = [who for who in by_name if who != OURS]
    broken: dict[str, str] = {}
    if VLLM in by_name:  # its first steps compile and tune
        warm = alternate({VLLM: partial(by_name[VLLM], jobs)}, 1, partial(Run.rate, jobs=jobs), may_fail=peers)
        broken = warm.failed
    runs = {who: partial(run, jobs) for who, run in by_name.items() if who not in broken}
    contest = alternate(runs, rounds, partial(Run.rate, jobs=jobs), label=f"{{}} ({name})", may_fail=peers)
    when = f"over {jobs[-1].arrival:.3g} s" if has_arrivals else "at once"
    prompt, tokens = sum(len(job.prompt) for job in jobs), sum(job.tokens for job in jobs)
    print(
        f"{name}: {len(jobs)} requests {when}, {prompt} prompt and {tokens} output tokens, medians of {rounds} rounds"
        " after one that is not counted"
    )
    medians = dict(contest.medians)
    yield Record(
        f"output_throughput {name}", medians.pop(OURS), "tokens/s", TARGETS.get(name), LIMITS.get(name), medians
    )
    for who in medians:
        target = 2.0 if name == "nano" and who in (CONTINUOUS, TUNED) else None
        yield contest.ratio(f"output_throughput_ratio {name} ({who})", OURS, who, target)
    for who, measured in contest.runs.items():
        yield from run_latencies(f"{name} ({who})", measured)
    yield Record(f"output_throughput {name}, first round", cold.medians[OURS], "tokens/s")
    yield from run_latencies(f"{name}, first round", cold.runs[OURS])
    for who, why in (broken | contest.failed).items():
        yield not_measured(f"output_throughput_ratio {name} ({who})", why)
    last = {who: measured[-1] for who, measured in contest.runs.items()}
    for who in medians:
        yield from _peer_settings(f"{name} ({who})", last[who], len(jobs))
    yield from _kv_usage(name, last)
    yield _kv_cache_sizes(name, assembly, vllm, last)
    if assembly.device.type == "cuda":
        yield Record(f"kernels compiled after ready {name}", after_ready.count - compiled, "kernels", 0, 0)
    elif name != "beam4" and peer is not None:
        yield not_measured(f"output_throughput_ratio {name} ({TUNED})", NO_GPU)


def _kv_cache_sizes(name: str, assembly: Assembly, vllm: Vllm | None, runs: Mapping[str, Run]) -> Record:
    """Return how many tokens fit into the KV cache of each contestant that allocates one."""
    blocks = assembly.scheduler.blocks
    sizes = {
        who: int(run.settings["num_blocks"]) * int(run.settings["page_size"])
        for who, run in runs.items()
        if run.settings
    }
    if vllm and VLLM in runs:
        sizes[VLLM] = vllm.kv_cache_tokens
    return Record(f"KV cache {name}", blocks.num_pages * blocks.block_size, "tokens", peers=sizes)


def _peer_settings(what: str, run: Run, count: int) -> Iterator[Record]:
    """Yield the settings of a peer and, if it did not have memory for all requests, how many it ran."""
    if run.settings:
        words = ", ".join(value for value in run.settings.values() if isinstance(value, str))
        numbers = {key: value for key, value in run.settings.items() if not isinstance(value, str)}
        yield Record(f"settings {what}: {words}", numbers.pop("page_size"), "tokens/page", peers=numbers)
    if run.requests < count:
        yield Record(f"requests that fit into memory {what}", run.requests, "requests", limit=count)


def _kv_usage(name: str, runs: Mapping[str, Run]) -> Iterator[Record]:
    """Yield the KV cache slots per token while all requests run at the same time."""
    slots = {who: run.peak_slots / run.peak_tokens for who, run in runs.items() if run.peak_tokens}
    if OURS in slots and name == "mixed":
        peers = {who: value for who, value in slots.items() if who == PADDED}
        yield Record(f"kv_slots_per_token_at_peak {name}", slots[OURS], "slots/token", limit=1.0, peers=peers)


# --- the GPU -------------------------------------------------------------------------------------------------------


def idle(name: str, device: torch.device, run: Callable[[], object]) -> Record:
    """Return the record of `gpu_idle` while a workload runs."""
    if device.type != "cuda":
        return not_measured(f"GPU idle {name}", NO_GPU)
    return Record(f"GPU idle {name}", gpu_idle(run), "%", 2.0, 0.0)


def gpu_idle(run: Callable[[], object]) -> float:
    """Return the percentage of the wall time of `run` without a kernel or copy on the GPU, by torch.profiler.

    It is an upper bound, because the profiler slows down the host.
    """
    wall, events = _profiled(run)
    return 100 * (1 - _union([(event.time_range.start, event.time_range.end) for event in events]) / 1e6 / wall)


def kernels(name: str, steps: int, run: Callable[[], object]) -> Iterator[Record]:
    """Yield the GPU time of the kernels that take the most in `run`, per step, and how often each is launched.

    steps: number of steps in the run. Steps with prompts count like the others, so there should be few of them.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for event in _profiled(run)[1]:
        times[event.name[:LONGEST_NAME]].append(event.time_range.end - event.time_range.start)
    total, launches = sum(map(sum, times.values())), sum(map(len, times.values()))
    yield Record(f"GPU time of a step {name}", total / steps, "us", peers={"launches": launches / steps})
    for kernel in sorted(times, key=lambda name: -sum(times[name]))[:MOST_KERNELS]:
        launched = {"launches": len(times[kernel]) / steps}
        yield Record(f"GPU time of a step {name}: {kernel}", sum(times[kernel]) / steps, "us", peers=launched)


def _profiled(run: Callable[[], object]) -> tuple[float, list[Any]]:
    """Return the seconds that `run` takes, and the profiler's events of the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    return wall, [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, covered_to = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return length


# --- the benchmark -------------------------------------------------------------------------------------------------


def measure(args: Namespace) -> Iterator[Record]:
    on_gpu = torch.cuda.is_available()
    names = args.workload or (["mixed"] if args.quick or not on_gpu else list(WORKLOADS))
    num_requests = args.requests or (256 if on_gpu else 32)
    budget = args.budget or (8192 if on_gpu else max(512, num_requests))
    options = model_options(args.model or ("Qwen3-0.6B" if on_gpu else "demo"))
    options |= {
        "dtype": args.dtype or ("auto" if on_gpu else "float32"),
        "max_num_seqs": min(budget, num_requests * (4 if {"n4", "beam4"} & set(names) else 1)),
        "max_num_batched_tokens": budget,
        "gpu_memory_utilization": 0.45,  # leaves the same share for the peers
    }
    if not on_gpu and (blocks := blocks_for(names, num_requests)):
        options["num_gpu_blocks_override"] = blocks
    for caching in sorted({name in CACHED for name in names}):
        config = EngineConfig.from_options(options | {"enable_prefix_caching": caching})
        yield from _with_one_engine(config, args, [name for name in names if (name in CACHED) == caching], num_requests)
        gc.collect()  # frees its block pool


def _with_one_engine(
    config: EngineConfig, args: Namespace, names: Sequence[str], num_requests: int
) -> Iterator[Record]:
    """Yield the figures of the load and of each workload."""
    started = time.monotonic()
    assembly = assemble(config)
    what = "load to ready" + (" with a prefix cache" if config.enable_prefix_caching else "")
    yield Record(what, time.monotonic() - started, "s")
    with ExitStack() as stack:
        stack.callback(assembly.close)
        vllm, peer = None, None
        if "vllm" in args.peers:
            started = time.monotonic()
            try:
                vllm = start_vllm(config, assembly, stack)
                yield Record(f"{what} ({VLLM})", time.monotonic() - started, "s")
            except Exception as error:
                yield not_measured(f"{what} ({VLLM})", f"{error}".partition("\n")[0])
        if "transformers" in args.peers:
            peer = load_transformers(config, assembly.loaded, assembly.device)
        vocab, limit = assembly.loaded.spec.vocab_size, assembly.limits.max_model_len
        workloads = {name: workload(name, num_requests, vocab, limit, args.rate) for name in names}
        for name, jobs in workloads.items():
            yield from compare(assembly, peer, vllm, name, jobs, args.rounds)
        # Last, because the profiler takes long.
        for name in PROFILED if assembly.device.type == "cuda" else ():
            if name in workloads:
                jobs = [replace(job, output=PROFILED_STEPS) for job in workloads[name]]
                yield from kernels(name, PROFILED_STEPS, partial(run_paged, assembly, jobs))
        for name, jobs in workloads.items():
            if name in WORKLOADS:  # not for requests of equal lengths
                yield idle(name, assembly.device, partial(run_paged, assembly, jobs))


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    for record in records:
        if record.name.startswith("output_throughput ") and "first round" not in record.name:
            name = record.name.partition(" ")[2]
            yield Bars(f"{name}, output tokens/s", {OURS: record.value or 0.0, **record.peers}, grey=record.peers)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option(None),
        Option(
            "--workload",
            f"workload to run: {', '.join(WORKLOADS)}, or REQUESTSxPROMPT/OUTPUT such as 16x512/256"
            " (default: mixed on a CPU, all on a GPU)",
            many=True,
            type=workload_name,
            metavar="NAME",
        ),
        Option("--rate", "Poisson request rate per second (default: all requests at once)", type=rate),
        Option("--dtype", "data type of weights and KV cache (default: float32 on a CPU, the model's on a GPU)"),
        Option("--requests", "number of requests (default: 32 on a CPU, 256 on a GPU)", type=count),
        Option("--budget", "maximum number of tokens per step (default: 512 on a CPU, 8192 on a GPU)", type=count),
        rounds_option(3),
        Option(
            "--peers",
            "engines to compare with (default: transformers, and on a GPU vLLM if it is installed)",
            list(PEERS if torch.cuda.is_available() else PEERS[:1]),
            nargs="+",
            choices=PEERS,
        ),
        Option("--alone", "do not run other engines", dest="peers", action="store_const", const=()),
    ),
    quick={"requests": 4, "rounds": 1},
)
