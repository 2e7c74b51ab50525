"""Measure throughput and latencies of the engine without a server, and of other engines for the same requests.

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
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from paged_bench._gpu_idle import idle, kernels
from paged_bench._report import (
    NO_GPU,
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
from paged_bench._vllm import VLLM, Vllm
from paged_bench._vllm import start as start_vllm
from paged_bench._workload import (
    WORKLOADS,
    Contestant,
    Job,
    Run,
    blocks_for,
    model_names,
    model_options,
    workload,
    workload_name,
)
from paged_kernels.compilation import after_ready

OURS = "paged"
CONTINUOUS, TUNED = "transformers, continuous", "transformers, continuous, tuned"
PADDED, ALONE = "transformers, one padded batch", "transformers, one at a time"
PEERS = ("vllm", "transformers")
CACHED = ("system-prompt",)  # workloads with a prefix cache; in the others, rounds repeat the same prompts
TARGETS = {"nano": 20_000.0}  # output tokens/s of Qwen3-0.6B on an H200
PROFILED, PROFILED_STEPS = ("1x128/256", "16x512/256", "64x2048/128"), 32  # workloads, and tokens of each request
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


def contestants(
    assembly: Assembly, peer: torch.nn.Module | None, vllm: Vllm | None, name: str, budget: int
) -> dict[str, Contestant]:
    """Return the contestants that support a workload and are not disproportionately slow."""
    found: dict[str, Contestant] = {OURS: partial(run_paged, assembly)}
    if vllm and name != "beam4":
        found[VLLM] = vllm.run
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


def measure(
    assembly: Assembly, peer: torch.nn.Module | None, vllm: Vllm | None, name: str, jobs: list[Job], rounds: int
) -> list[Record]:
    """Return all figures of one workload."""
    tokens = sum(job.tokens for job in jobs)
    budget = assembly.scheduler.max_num_batched_tokens
    has_arrivals = jobs[-1].arrival > 0  # the throughput then is the arrival rate, and the latencies matter
    by_name = contestants(assembly, peer, vllm, name, budget)
    by_name = {one: run for one, run in by_name.items() if not has_arrivals or one not in (PADDED, ALONE)}
    runs: dict[str, list[Run]] = {one: [] for one in by_name}
    failed: dict[str, str] = {}

    def timed(one: str) -> float:
        if one in failed:
            return math.nan
        try:
            runs[one].append(by_name[one](jobs))
        except Exception as error:  # an error of a peer does not affect the figures of the others
            if one == OURS:
                raise
            failed[one] = f"{type(error).__name__}: {error}".partition("\n")[0]
            return math.nan
        run = runs[one][-1]
        return sum(job.tokens for job in jobs[: run.requests]) / run.seconds

    compiled = after_ready.count
    cold_rate = timed(OURS)
    cold = runs[OURS].pop()
    if VLLM in by_name:  # its first steps compile and tune
        timed(VLLM)
        runs[VLLM].clear()
    figures = alternate({f"{one} ({name})": partial(timed, one) for one in by_name}, rounds)
    rates = dict(zip(by_name, figures.values(), strict=True))
    ours = rates.pop(OURS)
    rates = {one: values for one, values in rates.items() if one not in failed}
    peers = {one: statistics.median(values) for one, values in rates.items()}
    prompt = sum(len(job.prompt) for job in jobs)
    when = f"over {jobs[-1].arrival:.3g} s" if has_arrivals else "at once"
    print(
        f"{name}: {len(jobs)} requests {when}, {prompt} prompt and {tokens} output tokens, medians of {rounds} rounds"
        " after one that is not counted"
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
    records.append(Record(f"output_throughput {name}, first round", cold_rate, "tokens/s"))
    records += latencies(f"{name}, first round", [cold])
    records += [not_measured(f"output_throughput_ratio {name} ({one})", why) for one, why in failed.items()]
    for one in rates:
        records += _peer_settings(f"{name} ({one})", runs[one][-1], len(jobs))
    records += _kv_usage(name, runs)
    records.append(_kv_cache_sizes(name, assembly, vllm, {one: runs[one][-1] for one in rates}))
    if assembly.device.type == "cuda":
        records.append(Record(f"kernels compiled after ready {name}", after_ready.count - compiled, "kernels", 0, 0))
    elif name != "beam4" and peer is not None:
        records.append(not_measured(f"output_throughput_ratio {name} ({TUNED})", NO_GPU))
    return records


def _kv_cache_sizes(name: str, assembly: Assembly, vllm: Vllm | None, runs: Mapping[str, Run]) -> Record:
    """Return how many tokens fit into the KV cache of each contestant that allocates one."""
    blocks = assembly.scheduler.blocks
    sizes = {
        one: int(run.settings["num_blocks"]) * int(run.settings["page_size"])
        for one, run in runs.items()
        if run.settings
    }
    if vllm and VLLM in runs:
        sizes[VLLM] = vllm.kv_cache_tokens
    return Record(f"KV cache {name}", blocks.num_blocks * blocks.block_size, "tokens", peers=sizes)


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
    if not on_gpu and (blocks := blocks_for(names, count)):
        options["num_gpu_blocks_override"] = blocks
    records = Records(args)
    for caching in sorted({name in CACHED for name in names}):
        config = EngineConfig.from_options(options | {"enable_prefix_caching": caching})
        mine = [name for name in names if (name in CACHED) == caching]
        for found in _with_one_assembly(config, args, mine, count):
            records += found
        gc.collect()  # frees its block pool
    publish(records, lambda file, caption: draw(records, names, file, caption))
    return 0


def _with_one_assembly(
    config: EngineConfig, args: Namespace, names: Sequence[str], count: int
) -> Iterator[list[Record]]:
    """Yield the figures of the load and of each workload."""
    started = time.monotonic()
    assembly = assemble(config)
    what = "load to ready" + (" with a prefix cache" if config.enable_prefix_caching else "")
    yield [Record(what, time.monotonic() - started, "s")]
    with ExitStack() as stack:
        stack.callback(assembly.close)
        vllm, peer = None, None
        if "vllm" in args.peers:
            started = time.monotonic()
            try:
                vllm = start_vllm(config, assembly, stack)
                yield [Record(f"{what} ({VLLM})", time.monotonic() - started, "s")]
            except Exception as error:
                yield [not_measured(f"{what} ({VLLM})", f"{error}".partition("\n")[0])]
        if "transformers" in args.peers:
            peer = _peers.load(config, assembly.loaded, assembly.device)
        vocab, limit = assembly.loaded.spec.vocab_size, assembly.limits.max_model_len
        every = {name: workload(name, count, vocab, limit, args.rate) for name in names}
        for name, jobs in every.items():
            yield measure(assembly, peer, vllm, name, jobs, args.rounds)
        # Last, because the profiler takes long.
        for name in PROFILED if assembly.device.type == "cuda" else ():
            if name in every:
                jobs = [replace(job, output=PROFILED_STEPS) for job in every[name]]
                yield list(kernels(name, PROFILED_STEPS, partial(run_paged, assembly, jobs)))
        yield [  # not for requests of equal lengths
            idle(name, assembly.device, partial(run_paged, assembly, jobs))
            for name, jobs in every.items()
            if name in WORKLOADS
        ]


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
        type=workload_name,
        metavar="NAME",
        help=f"workload to run: {', '.join(WORKLOADS)}, or REQUESTSxPROMPT/OUTPUT such as 16x512/256; may be repeated"
        " (default: mixed on a CPU, all on a GPU)",
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
    add(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=PEERS if torch.cuda.is_available() else ["transformers"],
        help="engines to compare with (default: transformers, and on a GPU vLLM if it is installed)",
    )
    add("--alone", dest="peers", action="store_const", const=(), help="do not run other engines")
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
