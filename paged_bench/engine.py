"""Measure throughput and latencies of the engine without a server, and of transformers for the same requests.

All contestants run the same weights (or the same shapes with random weights) with the same dtype on the same device,
and generate the same number of tokens for each request: the end of sequence is ignored. Only requested tokens count.
Time to first token starts at the arrival of a request. Time between tokens is within a sequence.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.memory.page_population import wait_until_populated
from paged_bench import _peers
from paged_bench._engine import serve
from paged_bench._report import (
    NO_GPU,
    Record,
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
from paged_bench._workload import WORKLOADS, Contestant, Job, Run, model_names, model_options, workload

OURS = "paged"
CONTINUOUS, TUNED = "transformers, continuous", "transformers, continuous, tuned"
PADDED, ALONE = "transformers, one padded batch", "transformers, one at a time"
CACHED = ("system-prompt",)  # workloads with a prefix cache; in the others, rounds repeat the same prompts
TARGETS = {"nano": 20_000.0}  # output tokens/s of Qwen3-0.6B on an H200
LIMITS = {"nano": 36_500.0}  # limit by its memory bandwidth


def requests_of(jobs: Sequence[Job], assembly: Assembly) -> list[GenerateRequest]:
    requests = []
    for key, job in enumerate(jobs):
        temperature = 1.0 if job.n > 1 or job.beams > 1 else 0.0
        sampling = SamplingParams(
            max_tokens=job.output, temperature=temperature, n=job.n, beam_width=job.beams, ignore_eos=True
        )
        requests.append(GenerateRequest.from_prompt(key, job.prompt, sampling, key, frozenset(), assembly.limits))
    return requests


def run_paged(assembly: Assembly, jobs: Sequence[Job]) -> Run:
    """Run jobs with the engine on its own thread, as in the server, once the memory of its KV cache is populated."""
    wait_until_populated()
    started = time.monotonic()
    requests = requests_of(jobs, assembly)
    stamps: dict[tuple[int, int], list[float]] = {}
    outputs: list[list[int]] = [[] for _ in jobs]
    peak = (0, 0)
    lengths = [len(job.prompt) for job in jobs]  # number of tokens of each running request
    arrivals = [job.arrival for job in jobs] if jobs[-1].arrival else None
    for output in serve(assembly, requests, arrivals):
        for delta in output.deltas:
            when = output.finished_at - started - jobs[delta.key].arrival
            stamps.setdefault((delta.key, delta.sample), []).extend([when] * len(delta.token_ids))
            if delta.sample == 0:
                outputs[delta.key] += delta.token_ids
            lengths[delta.key] = 0 if delta.last else lengths[delta.key] + len(delta.token_ids)
        if output.stats.waiting == 0 and output.stats.running == len(jobs):
            # The newest token of a sequence is not in the KV cache yet.
            live = sum(lengths) - len(jobs)
            peak = max(peak, (output.stats.blocks_used * assembly.scheduler.blocks.block_size, live))
    seconds = time.monotonic() - started
    assert all(len(stamps[key, 0]) == job.output for key, job in enumerate(jobs))
    assert sum(map(len, stamps.values())) == sum(job.tokens for job in jobs)
    return Run(seconds, len(jobs), list(stamps.values()), outputs, *peak)


def latencies(what: str, runs: Sequence[Run]) -> Iterator[Record]:
    """Yield time to first token and time between tokens, p50 and p99 over all sequences of all rounds."""
    stamps = [one for run in runs for one in run.stamps if one]
    first = [one[0] for one in stamps]
    between = [later - earlier for one in stamps for earlier, later in itertools.pairwise(one)]
    for name, values in (("time to first token", first), ("time between tokens", between)):
        for share in (0.5, 0.99) if values else ():
            yield Record(f"{name} p{100 * share:.0f} {what}", 1e3 * percentile(values, share), "ms")


def gpu_idle(run: Callable[[], object]) -> float:
    """Return the share of the wall time of `run` without a kernel or copy on the GPU, in %, by torch.profiler.

    It is an upper bound, because the profiler slows down the host.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return 100 * (1 - _union(spans) / 1e6 / wall)


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, covered_to = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return length


def contestants(assembly: Assembly, peer: torch.nn.Module | None, name: str, budget: int) -> dict[str, Contestant]:
    """Return the contestants that support a workload and are not disproportionately slow."""
    found: dict[str, Contestant] = {OURS: partial(run_paged, assembly)}
    if peer is None:
        return found
    if name != "beam4":  # continuous batching has no beam search
        sharing = name in CACHED
        found[CONTINUOUS] = _peers.continuous(peer, budget, tuned=False, sharing=sharing)
        if assembly.device.type == "cuda":
            found[TUNED] = _peers.continuous(peer, budget, tuned=True, sharing=sharing)
    if assembly.device.type == "cuda":  # half of the free memory is left for attention and logits
        found[PADDED] = _peers.padded(peer, torch.cuda.mem_get_info(assembly.device)[0] / 2)
    elif name in ("mixed", "alpaca", "n4", "beam4"):
        found[PADDED] = _peers.padded(peer)
    if name == "mixed":
        found[ALONE] = _peers.one_at_a_time(peer)
    return found


def measure(assembly: Assembly, peer: torch.nn.Module | None, name: str, jobs: list[Job], rounds: int) -> list[Record]:
    """Return all figures of one workload."""
    tokens = sum(job.tokens for job in jobs)
    budget = assembly.scheduler.max_num_batched_tokens
    has_arrivals = jobs[-1].arrival > 0  # the throughput then is the arrival rate, and the latencies matter
    by_name = contestants(assembly, peer, name, budget)
    by_name = {one: run for one, run in by_name.items() if not has_arrivals or one not in (PADDED, ALONE)}
    runs: dict[str, list[Run]] = {one: [] for one in by_name}
    failed: dict[str, str] = {}

    def timed(one: str) -> float:
        try:
            runs[one].append(by_name[one](jobs))
        except Exception as error:  # an error of a peer does not affect the figures of the others
            if one == OURS:
                raise
            failed[one] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return math.nan
        run = runs[one][-1]
        return sum(job.tokens for job in jobs[: run.requests]) / run.seconds

    figures = alternate({f"{one} ({name})": partial(timed, one) for one in by_name}, rounds)
    rates = dict(zip(by_name, figures.values(), strict=True))
    ours = rates.pop(OURS)
    rates = {one: values for one, values in rates.items() if one not in failed}
    peers = {one: statistics.median(values) for one, values in rates.items()}
    prompt = sum(len(job.prompt) for job in jobs)
    when = f"over {jobs[-1].arrival:.3g} s" if has_arrivals else "at once"
    print(
        f"{name}: {len(jobs)} requests {when}, {prompt} prompt and {tokens} output tokens, medians of {rounds} rounds"
    )
    records = [
        Record(
            f"output_throughput {name}", statistics.median(ours), "tokens/s", TARGETS.get(name), LIMITS.get(name), peers
        )
    ]
    for one, values in rates.items():
        target = 2.0 if name == "nano" and one in (CONTINUOUS, TUNED) else None
        records.append(ratio(f"output_throughput_ratio {name} ({one})", ours, values, target))
    for one in (OURS, *rates):
        records += latencies(f"{name} ({one})", runs[one])
    records += [not_measured(f"output_throughput_ratio {name} ({one})", why) for one, why in failed.items()]
    for one in rates:
        records += _peer_settings(f"{name} ({one})", runs[one][-1], len(jobs))
    records += _kv_usage(name, runs)
    if assembly.device.type == "cuda":
        records.append(Record(f"GPU idle {name}", gpu_idle(lambda: run_paged(assembly, jobs)), "%", 2.0, 0.0))
    else:
        if name != "beam4" and peer is not None:
            records.append(not_measured(f"output_throughput_ratio {name} ({TUNED})", NO_GPU))
        records.append(not_measured(f"GPU idle {name}", NO_GPU))
    return records


def _peer_settings(what: str, run: Run, count: int) -> Iterator[Record]:
    """Yield the settings of a peer and, if it did not have memory for all requests, how many it ran."""
    if run.settings:
        words = ", ".join(value for value in run.settings.values() if isinstance(value, str))
        numbers = {key: value for key, value in run.settings.items() if not isinstance(value, str)}
        yield Record(f"settings {what}: {words}", numbers.pop("page_size"), "tokens/page", peers=numbers)
    if run.requests < count:
        yield Record(f"requests that fit into memory {what}", run.requests, "requests", limit=count)


def _kv_usage(name: str, runs: dict[str, list[Run]]) -> Iterator[Record]:
    """Yield the KV cache slots per token while all requests run at the same time."""
    slots = {
        one: done[-1].peak_slots / done[-1].peak_tokens for one, done in runs.items() if done and done[-1].peak_tokens
    }
    if OURS in slots and name == "mixed":
        peers = {one: value for one, value in slots.items() if one == PADDED}
        yield Record(f"kv_slots_per_token_at_peak {name}", slots[OURS], "slots/token", limit=1.0, peers=peers)


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"requests": 4, "rounds": 1})
    on_gpu = torch.cuda.is_available()
    model = args.model or ("Qwen3-0.6B" if on_gpu else "demo")
    names = args.workload or (["mixed"] if args.quick or not on_gpu else list(WORKLOADS))
    count = args.requests or (256 if on_gpu else 32)
    budget = args.budget or (8192 if on_gpu else max(512, count))
    options = model_options(model) | {"dtype": args.dtype or ("auto" if on_gpu else "float32")}
    options |= {"max_num_seqs": min(budget, max(count, 4 * count if {"n4", "beam4"} & set(names) else count))}
    options |= {"max_num_batched_tokens": budget, "gpu_memory_utilization": 0.45}  # leaves as much for the peers
    if not on_gpu and "long" not in names:  # one prompt of "long" may be longer than all others together
        options["num_gpu_blocks_override"] = 35 * count * (4 if {"n4", "beam4"} & set(names) else 1)
    records, peer = [], None
    for caching in sorted({name in CACHED for name in names}):
        config = EngineConfig.from_options(options | {"enable_prefix_caching": caching})
        assembly = assemble(config)
        if peer is None and not args.alone:
            peer = _peers.load(config, assembly.loaded, assembly.device)
        vocab, limit = assembly.loaded.spec.vocab_size, assembly.limits.max_model_len
        for name in names:
            if (name in CACHED) == caching:
                jobs = workload(name, count, vocab, limit, args.rate)
                records += measure(assembly, peer, name, jobs, args.rounds)
        assembly.close()
        del assembly
        gc.collect()  # frees its block pool
    publish(records, args.json, lambda file, caption: draw(records, names, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("engine", __doc__)
    add = made.add_argument
    shapes = ", ".join(model_names())
    add(
        "--model",
        help=f"Hugging Face model directory, 'demo', or a shape with random weights: {shapes}"
        " (default: demo on a CPU, Qwen3-0.6B on a GPU)",
    )
    add(
        "--workload",
        action="append",
        choices=list(WORKLOADS),
        help="workload to run; may be repeated (default: mixed on a CPU, all on a GPU)",
    )
    add("--rate", type=rate, metavar="X", help="Poisson request rate per second (default: all requests at once)")
    add("--dtype", help="data type of weights and KV cache (default: float32 on a CPU, the model's on a GPU)")
    add("--requests", type=count, metavar="N", help="number of requests (default: 32 on a CPU, 256 on a GPU)")
    add(
        "--budget",
        type=count,
        metavar="N",
        help="maximum number of tokens per step (default: 512 on a CPU, 8192 on a GPU)",
    )
    add("--rounds", type=count, default=3, metavar="N", help="number of rounds (default: 3)")
    add("--alone", action="store_true", help="do not run transformers")
    return made


def draw(records: Sequence[Record], names: Sequence[str], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    found = {
        record.name.partition(" ")[2]: record for record in records if record.name.startswith("output_throughput ")
    }
    figure = Figure(figsize=(8, 0.6 + 2 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        values = {OURS: found[name].value, **found[name].peers}
        ordered = list(values)[::-1]
        colours = ["#76b900" if one == OURS else "#b0b0b0" for one in ordered]
        bars = axes.barh(ordered, [values[one] for one in ordered], color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_title(name, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("output tokens per second, median")
    figure.text(0, -0.08 / len(names), caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
