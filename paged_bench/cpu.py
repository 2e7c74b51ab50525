"""The engine on a CPU beside vLLM, llama.cpp and transformers, and where a decode step's time goes.

Contestants take turns, one awake at a time, with the same weights, dtype, threads and bytes for keys and values, and
each with its own defaults else. vLLM and llama.cpp run in environments of their own, made at first use. Every request
ignores the end of sequence, so that all generate as many tokens; what greedy requests generate is compared. Prefix
caches are on where that is the default (ours and vLLM's), but each round has other tokens: only what requests share
within a round is found. A decode step is the time between a sequence's tokens while all sequences decode; where it is
timed, our prompts go in whole steps. Ratios above 1 are in our favour.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from client.serving.environments import Environment
from client.serving.tritonserver import TritonServer
from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.memory.kv_cache import GIB, bytes_per_block
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.utils.machine import usable_cores
from paged_bench import _peers
from paged_bench._child import CHILDREN, Child
from paged_bench._environments import LLAMA_CPP, VLLM
from paged_bench._gguf import AS_PACKAGED, demo_gguf
from paged_bench._report import (
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
from paged_bench._step_profile import decode_step
from paged_bench._workload import Contestant, Job, Run, model_options, workload
from paged_bench.engine import OURS, latencies, run_paged
from paged_bench.kernels import machine
from paged_bench.server import compare, text_workload

PEERS = {  # as --peers names them, and the contestants that each of them brings
    "vllm": ("vLLM",),
    "llama.cpp": ("llama.cpp", f"llama.cpp, {AS_PACKAGED}"),
    "generate": ("transformers, one padded batch",),
    "batching": ("transformers, continuous",),
}
(THEIRS,), (PLAIN, PACKED), (PADDED,), (CONTINUOUS,) = PEERS.values()
KV_GIB = 4  # for keys and values of each
DECODE = "decode, batch 16, context 512"  # the step that is also taken apart
LEAST = ("ms", "s")  # units of which less is better


class NoSteadyStep(ValueError):
    """A run has no moment of the kind that is to be timed."""


@dataclass(frozen=True)
class Scenario:
    """One workload and the figure that is read from it."""

    name: str
    jobs: list[Job]
    figure: Callable[[Run, Sequence[Job]], float]
    unit: str
    ratios: Mapping[str, float | None]  # who takes part, and how much better we aim to be
    target: float | None = None


def step_ms(run: Run, jobs: Sequence[Job]) -> float:
    """Median time between tokens of the sequence that began last, until the first one has ended."""
    begun, ended = max(one[0] for one in run.stamps), min(one[-1] for one in run.stamps)
    last = max(run.stamps, key=lambda one: one[0])
    gaps = [later - earlier for earlier, later in pairwise(last) if begun <= earlier and later <= ended]
    if not gaps:
        raise NoSteadyStep(f"no step in which all {len(run.stamps)} sequences decode")
    return 1e3 * statistics.median(gaps)


def output_rate(run: Run, jobs: Sequence[Job]) -> float:
    return sum(job.tokens for job in jobs) / run.seconds


def prompt_rate(run: Run, jobs: Sequence[Job]) -> float:
    return sum(len(job.prompt) for job in jobs) / max(one[0] for one in run.stamps)


def scenarios(vocab_size: int, limit: int, arrivals: float, quick: bool) -> list[Scenario]:
    """All of them, shortened to a model of `limit` positions; or with `quick` a small one for each peer."""
    rnd = random.Random(2)

    def same(batch: int, prompt: int, output: int) -> list[Job]:
        fitting = min(prompt, limit - output)
        return [Job([rnd.randrange(vocab_size) for _ in range(fitting)], output) for _ in range(batch)]

    requests, tokens = (4, 32) if quick else (32, 64)  # of 16 prompts the first still decodes when the last begins
    even = workload("even", requests, vocab_size, limit)
    shared = [rnd.randrange(vocab_size) for _ in range(min(512, limit // 2))]
    behind = [replace(job, prompt=(shared + job.prompt)[: limit - job.output]) for job in even]
    faster: dict[str, float | None] = {THEIRS: 1.3}
    decoders: dict[str, float | None] = {THEIRS: 1.5, PADDED: 2.5, CONTINUOUS: 10.0}
    streams: dict[str, float | None] = {PLAIN: 1.0, PACKED: 1.0}
    timed = workload("even", requests, vocab_size, limit, arrivals)
    found = [
        Scenario(DECODE, same(16, 512, tokens), step_ms, "ms", decoders, 28.0),
        Scenario("even lengths", even, output_rate, "tokens/s", faster),
        Scenario(f"even lengths, {arrivals:g} requests/s", timed, output_rate, "tokens/s", faster),
        Scenario("8 streams", same(8, 144, tokens), output_rate, "tokens/s", streams),
    ]
    if quick:
        return found
    return [
        *found,
        Scenario("even lengths, 4 samples", [replace(one, n=4) for one in even], output_rate, "tokens/s", faster),
        Scenario("even lengths behind 512 tokens in common", behind, output_rate, "tokens/s", faster),
        Scenario("prefill, 16 prompts of 512", same(16, 512, 1), prompt_rate, "tokens/s", {THEIRS: 1.0, PADDED: None}),
        Scenario("decode, batch 1, context 512", same(1, 512, tokens), step_ms, "ms", {THEIRS: 1.2, PADDED: None}),
        Scenario("32 streams", same(32, 144, tokens), output_rate, "tokens/s", streams),
    ]


def permute_tokens(turn: int, jobs: Sequence[Job], vocab_size: int) -> list[Job]:
    """The same requests in other tokens: what they shared, they share."""
    other = list(range(vocab_size))
    random.Random(turn).shuffle(other)
    return [replace(job, prompt=[other[token] for token in job.prompt]) for job in jobs]


@dataclass
class Contestants:
    """Who is there, and why others are not."""

    contestants: dict[str, Contestant]
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, names: Sequence[str], made: Callable[[], Mapping[str, Contestant]]) -> None:
        """A peer's trouble must not cost the others' figures."""
        print(f"{names[0]}: loading ...", file=sys.stderr, flush=True)
        try:
            self.contestants.update(made())
        except Exception as error:
            self.leave_out(names, _reason(error))

    def leave_out(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self.contestants.pop(name, None)
            self.absent[name] = why

    def warm_up(self, jobs: Sequence[Job]) -> None:
        """What is compiled or allocated at the first call is so afterwards."""
        for who, run in list(self.contestants.items()):
            try:
                run(jobs)
            except Exception as error:
                if who == OURS:
                    raise
                self.leave_out([who], _reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def measure(scenario: Scenario, there: Contestants, vocab_size: int, rounds: int, exact: bool) -> list[Record]:
    """Every contestant once a round. exact: outputs must be the same."""
    who = [OURS, *(one for one in scenario.ratios if one in there.contestants)]
    runs: dict[str, list[Run]] = {one: [] for one in who}
    failed: dict[str, str] = {}

    def timed(one: str) -> float:
        jobs = permute_tokens(len(runs[one]), scenario.jobs, vocab_size)
        if one in failed:
            return math.nan
        try:
            runs[one].append(there.contestants[one](jobs))
            return scenario.figure(runs[one][-1], jobs)
        except Exception as error:
            if one == OURS and not isinstance(error, NoSteadyStep):
                raise
            failed[one] = _reason(error)
            return math.nan

    figures = alternate({f"{one} ({scenario.name})": partial(timed, one) for one in who}, rounds)
    values = dict(zip(who, figures.values(), strict=True))
    ours = values.pop(OURS)
    if OURS in failed:
        failed = dict.fromkeys(scenario.ratios, f"{OURS}: {failed[OURS]}") | failed
    values = {one: taken for one, taken in values.items() if one not in failed}
    medians = {one: statistics.median(taken) for one, taken in values.items()}
    records = [Record(scenario.name, statistics.median(ours), scenario.unit, scenario.target, peers=medians)]
    if OURS in failed:
        records = [replace(not_measured(scenario.name, failed[OURS]), target=scenario.target, peers=medians)]
    for one, taken in values.items():
        pair = (taken, ours) if scenario.unit in LEAST else (ours, taken)
        records.append(ratio(f"{scenario.name}: times {one}", *pair, scenario.ratios[one]))
        if one != PACKED and all(job.n == 1 for job in scenario.jobs):
            records.append(agreement(f"{scenario.name}: same as {one}", runs[OURS], runs[one], exact))
    if scenario.jobs[-1].arrival:
        for one in (OURS, *values):
            records += latencies(f"{scenario.name} ({one})", runs[one])
    missing = {one: why for one, why in (there.absent | failed).items() if one in scenario.ratios}
    return records + [
        replace(not_measured(f"{scenario.name}: times {one}", why), target=scenario.ratios[one])
        for one, why in missing.items()
    ]


def agreement(name: str, ours: Sequence[Run], theirs: Sequence[Run], exact: bool) -> Record:
    """Share of the requests with the same output, and how many tokens it takes until two differ."""
    pairs = [
        (one, other)
        for mine, his in zip(ours, theirs, strict=True)
        for one, other in zip(mine.outputs, his.outputs, strict=True)
    ]
    common = [next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), None) for pair in pairs]
    differing = [at for at in common if at is not None]
    peers = {"tokens before they differ, median": statistics.median(differing)} if differing else {}
    share = 100 * (len(common) - len(differing)) / len(common)
    return Record(name, share, "% of requests", 100.0 if exact else None, 100.0, peers)


def in_vllm(options: Mapping[str, Any], threads: int, at: ExitStack) -> Mapping[str, Contestant]:
    """As its documentation on CPUs advises: the threads of its one worker bound to all cores that we use, Intel's
    OpenMP preloaded, and tcmalloc where the machine has it."""
    VLLM.ensure()
    preloaded = [VLLM.directory / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")]
    variables = {
        "LD_PRELOAD": ":".join(str(library) for library in preloaded if library),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CACHE_ROOT": str(VLLM.directory / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(VLLM.directory / "cache" / "inductor"),
        "VLLM_USE_AOT_COMPILE": "0",  # what it saves that way it cannot load again (0.32.0), and compiles at each start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    child = _child(VLLM, "vllm_child.py", variables, at)
    _tell(VLLM, child.load(**options) | {"preloaded": variables["LD_PRELOAD"].replace(f"{VLLM.directory}/", "")})
    return {THEIRS: child}


def in_llama_cpp(model: str, kinds: Mapping[str, str], threads: int, at: ExitStack) -> Mapping[str, Contestant]:
    """By contestant, with weights of a kind. Keys and values in its default type, but in float32 where weights are."""
    if model != model_options("demo")["model"]:
        raise ValueError("only the demo model is there as a GGUF file")
    LLAMA_CPP.ensure()
    found = {}
    for who, kind in kinds.items():
        child = _child(LLAMA_CPP, "llama_cpp_child.py", {}, at)
        kv_dtype = "float32" if kind == "float32" else "float16"
        _tell(LLAMA_CPP, child.load(path=str(demo_gguf(kind)), num_threads=threads, kv_dtype=kv_dtype))
        found[who] = child
    return found


def _child(environment: Environment, script: str, variables: Mapping[str, str], at: ExitStack) -> Child:
    log = environment.directory / f"{Path(script).stem}.log"
    child = Child([environment.python, CHILDREN / script], log, variables)
    at.callback(child.close)
    return child


def _tell(environment: Environment, about: Mapping[str, Any]) -> None:
    print(f"{environment.package} {environment.version}: {_listed(about)}")


def _listed(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in about.items())


def in_transformers(config: EngineConfig, assembly: Assembly, names: Sequence[str]) -> Mapping[str, Contestant]:
    model = _peers.load(config, assembly.loaded, assembly.device)
    budget = assembly.scheduler.max_num_batched_tokens
    both = {PADDED: _peers.padded(model), CONTINUOUS: _peers.continuous(model, budget, tuned=False, sharing=True)}
    return {one: both[one] for one in names}


def contest(args: Any, options: Mapping[str, Any]) -> Iterator[Record]:
    """All scenarios, then our decode step by part. The others are gone by then."""
    config = EngineConfig.from_options(options)
    assembly = assemble(config)
    _tell_ours(config, assembly)
    vocab = assembly.loaded.spec.vocab_size
    found = scenarios(vocab, assembly.limits.max_model_len, args.rate, args.quick)
    with ExitStack() as at:
        there = gather(args, config, assembly, at)
        there.warm_up([replace(job, output=4) for job in found[0].jobs[:2]])
        steady = unpaced(config, assembly)
        for scenario in found:
            there.contestants[OURS] = partial(run_paged, steady if scenario.figure is step_ms else assembly)
            yield from measure(scenario, there, vocab, args.rounds, args.dtype == "float32")
    yield from profile(steady, next(one.jobs for one in found if one.name == DECODE), vocab, args.quick)
    assembly.close()


def unpaced(config: EngineConfig, assembly: Assembly) -> Assembly:
    """The same, but for prompts that go in whole steps (no `target_step_ms`): so that the first sequence still decodes
    when the last one begins, however slow the machine."""
    budget, before = config.max_num_batched_tokens, assembly.scheduler
    scheduler = Scheduler(
        before.blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=budget, costs=before.costs
    )
    return replace(assembly, scheduler=scheduler)


def gather(args: Any, config: EngineConfig, assembly: Assembly, at: ExitStack) -> Contestants:
    """All that --peers asks for and that can be had; those of another environment end with `at`."""
    there = Contestants({OURS: partial(run_paged, assembly)})
    asked = [peer for peer in PEERS if peer in args.peers]
    for peer in PEERS.keys() - asked:
        there.leave_out(PEERS[peer], f"not among --peers ({', '.join(asked)})")
    model = str(assembly.loaded.path)
    if "vllm" in asked:
        same = {"model": model, "dtype": args.dtype, "max_model_len": assembly.limits.max_model_len}
        there.add(PEERS["vllm"], lambda: in_vllm(same, args.threads, at))
    if "llama.cpp" in asked:
        kinds = {PLAIN: args.dtype, PACKED: AS_PACKAGED}
        there.add(PEERS["llama.cpp"], lambda: in_llama_cpp(model, kinds, args.threads, at))
    if local := [name for peer in ("generate", "batching") if peer in asked for name in PEERS[peer]]:
        there.add(local, lambda: in_transformers(config, assembly, local))
    return there


def _tell_ours(config: EngineConfig, assembly: Assembly) -> None:
    about = {
        "dtype": str(assembly.loaded.spec.dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
    }
    print(f"{OURS}: {_listed(about)}")


def profile(assembly: Assembly, jobs: Sequence[Job], vocab_size: int, quick: bool) -> Iterator[Record]:
    """Parts of our decode step, and what the bytes that it must read take at the bandwidth measured here."""
    try:
        parts = decode_step(lambda: run_paged(assembly, permute_tokens(-2, jobs, vocab_size)), len(jobs))
    except ValueError as error:
        yield not_measured(f"{DECODE}: parts", str(error))
    else:
        yield from (Record(f"{DECODE}: {part}", 1e3 * seconds, "ms") for part, seconds in parts.items())
    read = machine(assembly.device, assembly.loaded.spec.dtype, quick).read
    yield Record("read-only stream", read / 1e9, "GB/s")
    for name, nbytes in step_bytes(assembly, jobs).items():
        yield Record(f"{DECODE}: least for {name}", 1e3 * nbytes / read, "ms", peers={"MB": nbytes / 1e6})


def step_bytes(assembly: Assembly, jobs: Sequence[Job]) -> dict[str, int]:
    """That a decode step in the middle of the outputs must read. An embedding gives a row a token: nothing."""
    model, spec = assembly.loaded.model, assembly.loaded.spec
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    apart = {id(one.weight) for one in (*linears, model.get_input_embeddings())}
    weights = sum(one.in_features * one.out_features for one in linears) * spec.dtype.itemsize  # copies stand for them
    weights += sum(one.nbytes for one in model.parameters() if id(one) not in apart)
    tokens = sum(len(job.prompt) + job.output // 2 for job in jobs)
    return {"weights": weights, "keys and values": tokens * bytes_per_block(
        assembly.loaded.layers, 1, spec.kv_dtype)}  # fmt: skip


def through_server(options: Mapping[str, Any], rounds: int) -> Iterator[Record]:
    """The same requests in process and as perf_analyzer's gRPC streams, without a prefix cache: rounds repeat them."""
    name, limit, options = "even lengths", 0.95, dict(options) | {"enable_prefix_caching": False}
    assembly = assemble(EngineConfig.from_options(options))
    tokenizer = assembly.loaded.tokenizer
    work = text_workload(workload("even", 32, len(tokenizer), assembly.limits.max_model_len - 8), tokenizer)
    with TritonServer(options.pop("model"), options) as server:
        yield from compare(f"{name} served", assembly, server, work, rounds, None, limit)
    assembly.close()


def load_seconds(model: str, rounds: int) -> Record:
    """From the start of tritonserver until the model is ready, with the options that `paged serve` has by itself."""
    taken = []
    for turn in range(rounds):
        print(f"load {turn + 1} of {rounds} ...", end=" ", file=sys.stderr, flush=True)
        started = time.perf_counter()
        with TritonServer(model, {"device": "cpu"}):
            taken.append(time.perf_counter() - started)
        print(f"{taken[-1]:.1f} s", file=sys.stderr)
    spread = {"p10": percentile(taken, 0.1), "p90": percentile(taken, 0.9)}
    return Record("load to ready", statistics.median(taken), "s", 10.0, peers=spread)


def standing(record: Record) -> float | None:
    """How much of its target a figure is, 1 or more where it is reached; None where there is no target or no figure."""
    if record.target is None or record.value is None:
        return None
    return record.target / record.value if record.unit in LEAST else record.value / record.target


def target_report(records: Sequence[Record]) -> Iterator[str]:
    """A line for each target."""
    for record in records:
        if record.target is None:
            continue
        side = "at most" if record.unit in LEAST else "at least"
        share = standing(record)
        if share is None:
            unmeasured, _, why = record.unit.partition(": ")
            yield f"{unmeasured:16} {record.name}: {why}"
            continue
        how = "reached" if share >= 1 else f"missed by {100 * abs(record.value / record.target - 1):.0f}%"
        yield f"{how:16} {record.name}: {record.value:.4g} of {side} {record.target:g} {record.unit}"


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 1, "peers": ["generate"]})  # the others take a minute to load
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the server's
    options = model_options(args.model) | {
        "device": "cpu",
        "dtype": args.dtype,
        "kv_cache_memory_bytes": KV_GIB * GIB,
        "max_num_seqs": 128,
    }
    records = list(contest(args, options))
    if not args.quick:
        records += through_server(options, args.rounds)
        records.append(load_seconds(options["model"], args.rounds))
    publish(records, args.json, lambda file, caption: draw(records, file, caption))
    print("\n".join(target_report(records)))
    return 0


def _parser() -> ArgumentParser:
    made = parser("cpu", __doc__.partition("\n")[0])
    add = made.add_argument
    cores = usable_cores()
    add("--model", default="demo", help="a Hugging Face directory (default: demo)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of weights (default: bfloat16)")
    add("--peers", type=_peer_names, default=list(PEERS), metavar="A,B", help=f"of {', '.join(PEERS)} (default: all)")
    add("--rate", type=rate, default=8.0, metavar="X", help="requests a second where they arrive over time (default 8)")
    add("--threads", type=count, default=cores, metavar="N", help=f"of each contestant (default: {cores}, all cores)")
    add("--rounds", type=count, default=5, metavar="N", help="(default 5)")
    return made


def _peer_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise ArgumentTypeError(f"{unknown[0]!r}: must be of {', '.join(PEERS)}")
    return names


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    """The decode step in parts beside its floor, and how far each target is."""
    from matplotlib.figure import Figure

    targets = [one for one in records if standing(one) is not None][::-1]
    figure = Figure(figsize=(12, max(4, 0.3 * len(targets))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 2])
    _stacked(left, [one for one in records if one.unit == "ms" and one.name.startswith(f"{DECODE}: ")])
    shares = [standing(one) or 0.0 for one in targets]
    colours = ["#76b900" if share >= 1 else "#d08030" for share in shares]
    labels = [f"{one.name} ({'≤' if one.unit in LEAST else '≥'} {one.target:g} {one.unit})" for one in targets]
    bars = right.barh(labels, shares, color=colours)
    right.bar_label(bars, [f"{one.value:.3g}" for one in targets], padding=3, fontsize=7)
    right.axvline(1, color="black", linewidth=1)
    right.set_title("share of each target", fontsize=9)
    right.tick_params(labelsize=7)
    right.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.04, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")


def _stacked(axes: Any, parts: Sequence[Record]) -> None:
    floor = ": least for "
    for at, wanted in enumerate(
        [[one for one in parts if floor not in one.name], [one for one in parts if floor in one.name]]
    ):
        height = 0.0
        for one in wanted:
            value = one.value or 0.0
            axes.bar(at, value, bottom=height, label=f"{one.name.partition(': ')[2]} {value:.1f}")
            height += value
        axes.annotate(f"{height:.1f} ms", (at, height), ha="center", va="bottom", fontsize=8)
    axes.set_xticks([0, 1], ["paged", "bytes / bandwidth"], fontsize=8)
    axes.set_title(f"{DECODE}, ms", fontsize=9)
    axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
