"""Throughput and latencies of the engine without a server, beside transformers' ways to serve the same requests.

All contestants run the same weights (or the same shapes with random ones) in the same dtype on the same device and
generate the same number of tokens for each request: end of sequence is ignored. Only the tokens that a request asked
for count. Time to first token is from a request's arrival; between tokens, from one of a sequence to its next.
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
CACHED = ("system-prompt",)  # workloads that the prefix cache is on for; elsewhere rounds send the same prompts
TARGETS = {"nano": 20_000.0}  # output tokens/s of Qwen3-0.6B on an H200, and what its memory allows
LIMITS = {"nano": 36_500.0}


def requests_of(jobs: Sequence[Job], assembly: Assembly) -> list[GenerateRequest]:
    made = []
    for key, job in enumerate(jobs):
        greedy = 1.0 if job.n > 1 or job.beams > 1 else 0.0
        sampling = SamplingParams(
            max_tokens=job.output, temperature=greedy, n=job.n, beam_width=job.beams, ignore_eos=True
        )
        made.append(GenerateRequest.from_prompt(key, job.prompt, sampling, key, frozenset(), assembly.limits))
    return made


def run_paged(assembly: Assembly, jobs: Sequence[Job]) -> Run:
    """The engine on its own thread, as the server runs it."""
    started = time.monotonic()
    requests = requests_of(jobs, assembly)
    stamps: dict[tuple[int, int], list[float]] = {}
    outputs: list[list[int]] = [[] for _ in jobs]
    peak = (0, 0)
    held = [len(job.prompt) for job in jobs]
    arrivals = [job.arrival for job in jobs] if jobs[-1].arrival else None
    for output in serve(assembly, requests, arrivals):
        for delta in output.deltas:
            when = output.finished_at - started - jobs[delta.key].arrival
            stamps.setdefault((delta.key, delta.sample), []).extend([when] * len(delta.token_ids))
            if delta.sample == 0:
                outputs[delta.key] += delta.token_ids
            held[delta.key] = 0 if delta.last else held[delta.key] + len(delta.token_ids)
        if output.stats.waiting == 0 and output.stats.running == len(jobs):
            # The newest token of a sequence is not in the pool yet.
            live = sum(held) - len(jobs)
            peak = max(peak, (output.stats.blocks_used * assembly.scheduler.blocks.block_size, live))
    seconds = time.monotonic() - started
    assert all(len(stamps[key, 0]) == job.output for key, job in enumerate(jobs))
    assert sum(map(len, stamps.values())) == sum(job.tokens for job in jobs)
    return Run(seconds, len(jobs), list(stamps.values()), outputs, *peak)


def latencies(what: str, runs: Sequence[Run]) -> Iterator[Record]:
    """Time to first token and between tokens, p50 and p99 over all sequences of all rounds."""
    stamps = [one for run in runs for one in run.stamps if one]
    first = [one[0] for one in stamps]
    between = [later - earlier for one in stamps for earlier, later in itertools.pairwise(one)]
    for name, values in (("time to first token", first), ("time between tokens", between)):
        for share in (0.5, 0.99) if values else ():
            yield Record(f"{name} p{100 * share:.0f} {what}", 1e3 * percentile(values, share), "ms")


def gpu_idle(run: Callable[[], object]) -> float:
    """Share of the wall time of `run` in which no kernel or copy was on the GPU, in %, by torch.profiler's record of
    the device. The profiler itself slows the host: an upper bound."""
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
    """Length of what intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def contestants(assembly: Assembly, peer: torch.nn.Module | None, name: str, budget: int) -> dict[str, Contestant]:
    """Who can run this workload, and is not out of proportion slow in it."""
    found: dict[str, Contestant] = {OURS: partial(run_paged, assembly)}
    if peer is None:
        return found
    if name != "beam4":  # it has none
        sharing = name in CACHED
        found[CONTINUOUS] = _peers.continuous(peer, budget, tuned=False, sharing=sharing)
        if assembly.device.type == "cuda":
            found[TUNED] = _peers.continuous(peer, budget, tuned=True, sharing=sharing)
    if assembly.device.type == "cuda":  # half of what is free: attention and logits need room, too
        found[PADDED] = _peers.padded(peer, torch.cuda.mem_get_info(assembly.device)[0] / 2)
    elif name in ("mixed", "alpaca", "n4", "beam4"):
        found[PADDED] = _peers.padded(peer)
    if name == "mixed":
        found[ALONE] = _peers.one_at_a_time(peer)
    return found


def measure(assembly: Assembly, peer: torch.nn.Module | None, name: str, jobs: list[Job], rounds: int) -> list[Record]:
    """All figures of one workload."""
    tokens = sum(job.tokens for job in jobs)
    budget = assembly.scheduler.max_num_batched_tokens
    fixed = jobs[-1].arrival > 0  # latencies are what is to be seen: throughput is what arrives
    who = contestants(assembly, peer, name, budget)
    who = {one: run for one, run in who.items() if not fixed or one not in (PADDED, ALONE)}
    runs: dict[str, list[Run]] = {one: [] for one in who}

    failed: dict[str, str] = {}

    def timed(one: str) -> float:
        try:
            runs[one].append(who[one](jobs))
        except Exception as error:  # a peer's trouble must not cost the others' figures
            if one == OURS:
                raise
            failed[one] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return math.nan
        run = runs[one][-1]
        return sum(job.tokens for job in jobs[: run.requests]) / run.seconds

    figures = alternate({f"{one} ({name})": partial(timed, one) for one in who}, rounds)
    by_name = dict(zip(who, figures.values(), strict=True))
    ours = by_name.pop(OURS)
    by_name = {one: values for one, values in by_name.items() if one not in failed}
    peers = {one: statistics.median(values) for one, values in by_name.items()}
    prompt = sum(len(job.prompt) for job in jobs)
    how = f"over {jobs[-1].arrival:.3g} s" if fixed else "at once"
    print(f"{name}: {len(jobs)} requests {how}, {prompt} prompt and {tokens} output tokens, medians of {rounds} rounds")
    records = [
        Record(
            f"output_throughput {name}", statistics.median(ours), "tokens/s", TARGETS.get(name), LIMITS.get(name), peers
        )
    ]
    for one, values in by_name.items():
        target = 2.0 if name == "nano" and one in (CONTINUOUS, TUNED) else None
        records.append(ratio(f"output_throughput_ratio {name} ({one})", ours, values, target))
    for one in (OURS, *by_name):
        records += latencies(f"{name} ({one})", runs[one])
    records += [not_measured(f"output_throughput_ratio {name} ({one})", why) for one, why in failed.items()]
    for one in by_name:
        records += _chosen(f"{name} ({one})", runs[one][-1], len(jobs))
    records += _memory(name, runs)
    if assembly.device.type == "cuda":
        records.append(Record(f"GPU idle {name}", gpu_idle(lambda: run_paged(assembly, jobs)), "%", 2.0, 0.0))
    else:
        if name != "beam4" and peer is not None:
            records.append(not_measured(f"output_throughput_ratio {name} ({TUNED})", NO_GPU))
        records.append(not_measured(f"GPU idle {name}", NO_GPU))
    return records


def _chosen(what: str, run: Run, count: int) -> Iterator[Record]:
    """What a peer ran with, and how many requests it had memory for, where that is not all."""
    if run.settings:
        words = ", ".join(value for value in run.settings.values() if isinstance(value, str))
        numbers = {key: value for key, value in run.settings.items() if not isinstance(value, str)}
        yield Record(f"settings {what}: {words}", numbers.pop("page_size"), "tokens/page", peers=numbers)
    if run.requests < count:
        yield Record(f"requests that there is memory for {what}", run.requests, "requests", limit=count)


def _memory(name: str, runs: dict[str, list[Run]]) -> Iterator[Record]:
    """Slots of key/value memory for each token in them, where all requests ran at the same time."""
    held = {
        one: done[-1].peak_slots / done[-1].peak_tokens for one, done in runs.items() if done and done[-1].peak_tokens
    }
    if OURS in held and name == "mixed":
        peers = {one: value for one, value in held.items() if one == PADDED}
        yield Record(f"kv_slots_per_token_at_peak {name}", held[OURS], "slots/token", limit=1.0, peers=peers)


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"requests": 4, "rounds": 1})
    on_gpu = torch.cuda.is_available()
    model = args.model or ("Qwen3-0.6B" if on_gpu else "demo")
    names = args.workload or (["mixed"] if args.quick or not on_gpu else list(WORKLOADS))
    count = args.requests or (256 if on_gpu else 32)
    budget = args.budget or (8192 if on_gpu else max(512, count))
    options = model_options(model) | {"dtype": args.dtype or ("auto" if on_gpu else "float32")}
    options |= {"max_num_seqs": min(budget, max(count, 4 * count if {"n4", "beam4"} & set(names) else count))}
    options |= {"max_num_batched_tokens": budget, "gpu_memory_utilization": 0.45}  # as much is left for the others
    if not on_gpu and "long" not in names:  # one prompt of which may be more than all of the others
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
        gc.collect()  # its pool makes room for the next one's
    publish(records, args.json, lambda file, caption: draw(records, names, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("engine", __doc__)
    add = made.add_argument
    shapes = ", ".join(model_names())
    add("--model", help=f"a Hugging Face directory, 'demo', or with random weights: {shapes} (default: by machine)")
    add("--workload", action="append", choices=list(WORKLOADS), help="may be repeated (default: by machine)")
    add("--rate", type=rate, metavar="X", help="requests a second, Poisson; default: all at once")
    add("--dtype", help="of weights, keys and values (default: float32 on a CPU, the model's own on a GPU)")
    add("--requests", type=count, metavar="N", help="(default: 32 on a CPU, 256 on a GPU)")
    add(
        "--budget",
        type=count,
        metavar="N",
        help="tokens in one step at the most (default: 512 on a CPU, 8192 on a GPU)",
    )
    add("--rounds", type=count, default=3, metavar="N")
    add("--alone", action="store_true", help="leave transformers out")
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
