from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

from paged_backend.api.config import EngineConfig
from paged_backend.api.sizes import GIB
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.utils.machine import usable_cores
from paged_bench._engine import (
    OURS,
    Contestant,
    Job,
    Run,
    between,
    load,
    model_options,
    permute_tokens,
    run_latencies,
    run_paged,
    workload,
)
from paged_bench._harness import (
    Bars,
    Benchmark,
    Contest,
    Option,
    Record,
    TimePlan,
    alternate,
    first_line,
    minutes_option,
    model_option,
    not_measured,
    percentile,
    rounds_option,
    spread,
)
from paged_bench._levels import is_limit, level_option, limit, limited_threads
from paged_bench._limits import (
    Machine,
    cpu_limits,
    multiply_shares,
    prompt_flops,
    read_shares,
    share_panel,
    step_bytes,
)
from paged_bench._peers import (
    FASTEST_4_BIT,
    LlamaCpp,
    continuous,
    demo_gguf,
    load_transformers,
    padded,
    print_settings,
    quantized_gguf,
    start_vllm_cpu,
)
from paged_bench._processes import ProcessGroup
from paged_bench._servers import text_workload
from paged_bench._step_profile import decode_step
from paged_bench.server import compare as compare_served
from paged_client.serving.tritonserver import TritonServer

KV_GIB = 2  # size of each contestant's KV cache
ONE_THREAD = ", 1 thread"  # after the name of a peer that runs beside a busy process with one thread
PEERS = {  # contestants of each peer, by the peer's name for --peers
    "vllm": ("vLLM",),
    "llama.cpp": ("llama.cpp", f"llama.cpp, {FASTEST_4_BIT}"),
    "generate": ("transformers, one padded batch",),
    "batching": ("transformers, continuous",),
}
(VLLM_NAME,), (LLAMA_CPP_NAME, LLAMA_CPP_PACKED), (PADDED,), (CONTINUOUS,) = PEERS.values()
BUSY_PEERS = (VLLM_NAME, LLAMA_CPP_NAME)  # contestants beside a busy process, also with one thread
DECODE = "decode, batch 16, context 512"  # the scenario whose step is also profiled
LESS_IS_BETTER = ("ms", "s", "times idle")  # units
CONDITIONS: Mapping[str, int | None] = {  # nice values of the neighbours; None: no neighbour
    "idle": None,
    "busy neighbour": 0,
    "busy neighbour at nice 19": 19,
}
IDLE = "idle"
MIN_SHARE = 0.7  # share of our own idle throughput
MIN_SPEEDUP = 2.0  # relative to the best peer under the same conditions
MAX_LATENCY = 4.0  # multiple of the idle p99 between tokens
LATENCY_UNIT = "times idle"
SPIN = "while True: pass"
PROBE = Job(list(range(64)), 8)
PROBE_SECONDS = 20.0  # limit for PROBE
RUN_SECONDS = 120.0  # limit for a run of another process
VLLM_LOAD_SECONDS = 180.0  # without compiled kernels for the data type, its warm-up takes longer
RUN_SHARE = 1 / 15  # share of --minutes that one run of a peer may take, as estimated
SERVED, SERVED_SECONDS, SERVED_ROUNDS = "server", 60.0, 2  # part of the plan, seconds of a round of it, most rounds
BUSY_SLOWDOWN = 7  # runs under all CONDITIONS take as long as so many idle ones, as estimated
SCENARIO_ROUNDS = 3  # rounds of a scenario for each round under all CONDITIONS, if the time suffices


# --- scenarios --------------------------------------------------------------------------------------------------------


class NoSteadyStep(ValueError):
    """A run has no step of the kind to be timed."""


@dataclass(frozen=True)
class Scenario:
    """A workload and the figure that is computed from a run of it."""

    name: str
    jobs: list[Job]
    figure: Callable[[Run, Sequence[Job]], float]
    unit: str
    ratios: Mapping[str, float | None]  # target of our speedup over each contestant
    target: float | None = None


def step_ms(run: Run, jobs: Sequence[Job]) -> float:
    """Return the median duration of steps in which all sequences decode, in ms.

    It is the time between tokens of the sequence that started last, until the first sequence has finished.
    """
    begin, end = max(times[0] for times in run.stamps), min(times[-1] for times in run.stamps)
    last = max(run.stamps, key=lambda times: times[0])
    gaps = [later - earlier for earlier, later in pairwise(last) if begin <= earlier and later <= end]
    if not gaps:
        raise NoSteadyStep(f"no step in which all {len(run.stamps)} sequences decode")
    return 1e3 * statistics.median(gaps)


def output_rate(run: Run, jobs: Sequence[Job]) -> float:
    """Return output tokens per second."""
    return run.rate(jobs)


def prompt_rate(run: Run, jobs: Sequence[Job]) -> float:
    """Return prompt tokens per second."""
    return sum(len(job.prompt) for job in jobs) / max(times[0] for times in run.stamps)


def scenarios(vocab_size: int, limit: int, arrivals: float, quick: bool) -> list[Scenario]:
    """Return the scenarios, with lengths that fit into a model of `limit` positions.

    Args:
        arrivals: requests per second in scenarios with arrival times.
        quick: return only a small scenario for each peer.
    """
    rng = random.Random(2)

    def equal_jobs(batch: int, prompt: int, output: int) -> list[Job]:
        length = min(prompt, limit - output)
        return [Job([rng.randrange(vocab_size) for _ in range(length)], output) for _ in range(batch)]

    # With these lengths the first of 16 requests still decodes when the last one starts.
    requests, tokens = (4, 32) if quick else (32, 64)
    even = workload("even", requests, vocab_size, limit)
    prefix = [rng.randrange(vocab_size) for _ in range(min(512, limit // 2))]
    shared_prefix = [replace(job, prompt=(prefix + job.prompt)[: limit - job.output]) for job in even]
    throughput: dict[str, float | None] = {VLLM_NAME: 1.3}
    decode: dict[str, float | None] = {VLLM_NAME: 1.5, PADDED: 2.5, CONTINUOUS: 10.0}
    streams: dict[str, float | None] = {LLAMA_CPP_NAME: 1.0, LLAMA_CPP_PACKED: 1.0}
    timed = workload("even", requests, vocab_size, limit, arrivals)
    selected = [
        Scenario(DECODE, equal_jobs(16, 512, tokens), step_ms, "ms", decode, 18.0),
        Scenario("even lengths", even, output_rate, "tokens/s", throughput),
        Scenario(f"even lengths, {arrivals:g} requests/s", timed, output_rate, "tokens/s", throughput),
        Scenario("8 streams", equal_jobs(8, 144, tokens), output_rate, "tokens/s", streams),
    ]
    if quick:
        return selected
    samples = [replace(job, n=4) for job in even]
    prefill: dict[str, float | None] = {VLLM_NAME: 1.1, PADDED: None}
    single: dict[str, float | None] = {VLLM_NAME: 1.3, PADDED: None}
    return [
        *selected,
        Scenario("even lengths, 4 samples", samples, output_rate, "tokens/s", throughput),
        Scenario("even lengths behind 512 tokens in common", shared_prefix, output_rate, "tokens/s", throughput),
        Scenario("prefill, 16 prompts of 512", equal_jobs(16, 512, 1), prompt_rate, "tokens/s", prefill),
        Scenario("decode, batch 1, context 512", equal_jobs(1, 512, tokens), step_ms, "ms", single),
        Scenario("32 streams", equal_jobs(32, 144, tokens), output_rate, "tokens/s", streams),
    ]


def stream_jobs(vocab_size: int, limit: int, quick: bool) -> Mapping[str, list[Job]]:
    """Return the requests of each workload: streams that start together."""
    rng, output = random.Random(3), 16 if quick else 64
    prompt = min(144, limit - output)

    def streams(count: int) -> list[Job]:
        return [Job([rng.randrange(vocab_size) for _ in range(prompt)], output) for _ in range(count)]

    return {"1 stream": streams(1)} | ({} if quick else {"32 streams": streams(32)})


# --- contestants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How fast a contestant is, to plan the time."""

    prompt_rate: float  # tokens per second of PROBE's prompt
    step: float  # seconds from token to token of PROBE

    @classmethod
    def of(cls, run: Run) -> Pace:
        """Return the pace of a run of PROBE."""
        stamps = run.stamps[0] if run.stamps and run.stamps[0] else [run.seconds] * 2
        return cls(len(PROBE.prompt) / max(stamps[0], 1e-6), (stamps[-1] - stamps[0]) / (len(stamps) - 1))

    def seconds(self, jobs: Sequence[Job]) -> float:
        """Return about how long the requests take: all tokens at the rate of a prompt, and the steps of the longest."""
        tokens = sum(len(job.prompt) + job.n * job.output for job in jobs)
        return tokens / self.prompt_rate + max(job.output for job in jobs) * self.step


class Part(NamedTuple):
    """A part of the benchmark, to plan the time."""

    name: str
    jobs: Sequence[Job]
    contestants: Sequence[str]
    runs: int  # idle runs of a contestant that take as long as its round
    rounds: int  # weight: rounds for each round of a part of weight 1


@dataclass
class Contestants:
    """The available contestants, and why the others are not available."""

    available: dict[str, Contestant]
    absent: dict[str, str] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)

    def add(self, names: Sequence[str], start: Callable[[], Mapping[str, Contestant]]) -> None:
        """Start contestants. An error makes them absent, but does not end the benchmark."""
        print(f"{names[0]}: loading ...", file=sys.stderr, flush=True)
        try:
            self.available.update(start())
        except Exception as error:
            self.leave_out(names, first_line(error))

    def leave_out(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.available.pop(name, None)
            self.absent[name] = reason

    @property
    def peers(self) -> list[str]:
        """The available contestants but ours."""
        return [name for name in self.available if name != OURS]

    def probe(self) -> None:
        """Measure the pace of all contestants with a small request, and leave out peers that take PROBE_SECONDS."""
        jobs, tokens = [PROBE], f"a request of {len(PROBE.prompt)} prompt and {PROBE.output} output tokens"
        for name, run in list(self.available.items()):
            print(f"{name}: probe ...", file=sys.stderr, flush=True)
            try:
                for _ in range(2):  # the first one may compile
                    made = run(jobs)
                    if name != OURS and made.seconds > PROBE_SECONDS:
                        raise TimeoutError(f"{tokens} took {made.seconds:.0f} s; the limit is {PROBE_SECONDS:.0f} s")
            except Exception as error:
                if name == OURS:
                    raise
                self.leave_out([name], str(error) if isinstance(error, TimeoutError) else first_line(error))
            else:
                self.paces[name] = Pace.of(made)

    def estimate(self, name: str, jobs: Sequence[Job]) -> float:
        """Return about how many seconds a run takes; 0 if there was no probe."""
        return self.paces[name].seconds(jobs) if name in self.paces else 0.0

    def round_seconds(self, part: Part) -> float:
        """Return about how many seconds a round of the available contestants takes."""
        return part.runs * sum(self.estimate(name, part.jobs) for name in part.contestants if name in self.available)

    def affordable(self, part: Part, seconds: float, most: float) -> Contestants:
        """Return the contestants of a part, without slow peers.

        A peer is slow if a run of it takes more than `most` seconds. If a round of the others takes more than
        `seconds`, the slowest of them are left out until it does not.
        """
        available = {name: self.available[name] for name in part.contestants if name in self.available}
        kept = Contestants(available, dict(self.absent), self.paces)
        for name in sorted(kept.peers, key=lambda name: -self.estimate(name, part.jobs)):
            own, total = self.estimate(name, part.jobs), kept.round_seconds(part)
            if own > most:
                kept.leave_out([name], f"a run would take about {own:.0f} s; the limit is {most:.0f} s")
            elif total > seconds:
                left = f"{seconds:.0f} s of --minutes are left for them"
                kept.leave_out([name], f"a round would take about {total:.0f} s; {left}")
            else:
                break
        return kept

    def warm_up(self, jobs: Sequence[Job]) -> None:
        """Run every contestant once, to keep compilation and allocation out of the timings."""
        runs = {name: partial(run, jobs) for name, run in self.available.items()}
        for name, why in alternate(runs, 1, lambda run: run.seconds, may_fail=self.peers, quiet=True).failed.items():
            self.leave_out([name], why)


def gather(args: Namespace, config: EngineConfig, assembly: Assembly, stack: ExitStack) -> Contestants:
    """Start our engine and all peers in --peers. `stack` ends the peers that run in other processes."""
    contestants = Contestants({OURS: partial(run_paged, assembly)})
    selected = [peer for peer in PEERS if peer in args.peers]
    for peer in PEERS.keys() - selected:
        contestants.leave_out(PEERS[peer], f"not among --peers ({', '.join(selected)})")
    loaded, local = str(assembly.loaded.path), [peer for peer in selected if peer in ("generate", "batching")]
    for threads in dict.fromkeys((args.threads, 1)):  # 1 thread is for a busy CPU, where it may be faster
        is_for_all = threads == args.threads
        suffix = "" if is_for_all else ONE_THREAD

        def add(names: Sequence[str], start: Callable[[], Mapping[str, Contestant]], suffix: str = suffix) -> None:
            contestants.add([name + suffix for name in names], lambda: {k + suffix: v for k, v in start().items()})

        if "vllm" in selected and is_limit(args.level):
            contestants.leave_out([VLLM_NAME + suffix], f"its kernels cannot be limited to {args.level}")
        elif "vllm" in selected:
            options = {"model": loaded, "dtype": args.dtype, "max_model_len": assembly.limits.max_model_len}
            add([VLLM_NAME], partial(_start_vllm, options, threads, stack))
        if "llama.cpp" in selected:
            names = [name for name in PEERS["llama.cpp"] if is_for_all or name in BUSY_PEERS]
            add(names, partial(_start_llama_cpp, names, loaded, args, threads, stack))
        if local and is_for_all:
            names = [name for peer in local for name in PEERS[peer]]
            add(names, partial(_load_transformers, config, assembly, names, threads))
    return contestants


def _start_vllm(options: Mapping[str, Any], threads: int, stack: ExitStack) -> Mapping[str, Contestant]:
    return {VLLM_NAME: start_vllm_cpu(options, threads, KV_GIB, stack, VLLM_LOAD_SECONDS, RUN_SECONDS)}


def _start_llama_cpp(
    names: Sequence[str], model: str, args: Namespace, threads: int, stack: ExitStack
) -> Mapping[str, Contestant]:
    """Start llama.cpp with the weights of the other engines, and with its fastest 4-bit weights, by contestant. Its
    keys and values have the type of the other engines'."""
    if model != model_options("demo")["model"]:
        raise ValueError("only the demo model is available as a GGUF file")
    llama_cpp = LlamaCpp(threads, stack, args.level)
    files = {
        LLAMA_CPP_NAME: partial(demo_gguf, args.dtype),
        LLAMA_CPP_PACKED: partial(quantized_gguf, FASTEST_4_BIT, partial(llama_cpp.quantize, kind=FASTEST_4_BIT)),
    }
    return {name: llama_cpp.start(files[name](), args.dtype) for name in names}


def _load_transformers(
    config: EngineConfig, assembly: Assembly, names: Sequence[str], threads: int
) -> Mapping[str, Contestant]:
    loaded = load_transformers(config, assembly.loaded, assembly.device)
    budget = assembly.scheduler.max_num_batched_tokens
    both = {PADDED: padded(loaded), CONTINUOUS: continuous(loaded, budget, tuned=False, sharing=True)}
    return {name: _with_threads(both[name], threads) for name in names}


def _with_threads(run: Contestant, threads: int) -> Contestant:
    """Return a contestant in this process with this number of PyTorch's threads."""

    def limited(jobs: Sequence[Job]) -> Run:
        with limited_threads(threads):
            return run(jobs)

    return limited


def without_step_target(config: EngineConfig, assembly: Assembly) -> Assembly:
    """Return the engine without `target_step_ms`, which would shorten the prompt chunks of a step.

    The first sequence then still decodes when the last one starts, even on a slow machine.
    """
    budget, scheduler = config.max_num_batched_tokens, assembly.scheduler
    unpaced = Scheduler(
        scheduler.blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=budget, costs=scheduler.costs
    )
    return replace(assembly, scheduler=unpaced)


# --- rounds -----------------------------------------------------------------------------------------------------------


def run_scenario(
    scenario: Scenario, contestants: Contestants, vocab_size: int, rounds: int, exact: bool, seconds: float = math.inf
) -> Iterator[Record]:
    """Run every contestant once per round. With `exact`, all outputs have to be the same. seconds: see `alternate`."""
    name, unit = scenario.name, scenario.unit
    peers = [who for who in scenario.ratios if who in contestants.available]

    def run(who: str, seeds: Iterator[int]) -> tuple[Run, float]:
        jobs = permute_tokens(next(seeds), scenario.jobs, vocab_size)
        made = contestants.available[who](jobs)
        try:
            return made, scenario.figure(made, jobs)
        except NoSteadyStep as error:
            unsteady[who] = first_line(error)
            return made, math.nan

    unsteady: dict[str, str] = {}
    runs = {who: partial(run, who, itertools.count()) for who in (OURS, *peers)}
    contest = alternate(runs, rounds, lambda made: made[1], label=f"{{}} ({name})", may_fail=peers, seconds=seconds)
    failed = contest.failed | unsteady
    if OURS in failed:
        failed = dict.fromkeys(scenario.ratios, f"{OURS}: {failed[OURS]}") | failed
    peers = [who for who in peers if who not in failed]
    medians = {who: contest.medians[who] for who in peers}
    if OURS in failed:
        yield replace(not_measured(name, failed[OURS], scenario.target), peers=medians)
    else:
        yield Record(name, contest.medians[OURS], unit, scenario.target, peers=medians)
    outputs = {who: [made for made, _ in runs] for who, runs in contest.runs.items()}
    for who in peers:
        pair = (who, OURS) if unit in LESS_IS_BETTER else (OURS, who)
        yield contest.ratio(f"{name}: times {who}", *pair, scenario.ratios[who])
        if who != LLAMA_CPP_PACKED and all(job.n == 1 for job in scenario.jobs):
            yield agreement(f"{name}: same as {who}", outputs[OURS], outputs[who], exact)
    if scenario.jobs[-1].arrival:
        for who in (OURS, *peers):
            yield from run_latencies(f"{name} ({who})", outputs[who])
    missing = {who: why for who, why in (contestants.absent | failed).items() if who in scenario.ratios}
    yield from (not_measured(f"{name}: times {who}", why, scenario.ratios[who]) for who, why in missing.items())


def agreement(name: str, ours: Sequence[Run], theirs: Sequence[Run], exact: bool) -> Record:
    """Return the share of requests with the same output, and after how many tokens the others differ."""
    pairs = [
        (own, other)
        for our_run, their_run in zip(ours, theirs, strict=True)
        for own, other in zip(our_run.outputs, their_run.outputs, strict=True)
    ]
    differing = [at for at in (_first_difference(*pair) for pair in pairs) if at is not None]
    peers = {"tokens before they differ, median": statistics.median(differing)} if differing else {}
    share = 100 * (len(pairs) - len(differing)) / len(pairs)
    return Record(name, share, "% of requests", 100.0 if exact else None, 100.0, peers)


def _first_difference(own: Sequence[int], other: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)


@contextmanager
def neighbours(nice: int | None) -> Iterator[None]:
    """Run one spinning process per two usable cores, at least one, with this nice value; None starts none."""
    count = 0 if nice is None else max(1, usable_cores() // 2)
    command = ["nice", "-n", str(nice), sys.executable, "-c", SPIN]
    processes = [ProcessGroup(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.end()


def run_busy(
    contestants: Contestants, name: str, jobs: Sequence[Job], vocab_size: int, rounds: int, seconds: float = math.inf
) -> Iterator[Record]:
    """Run every contestant once per round under each condition. A contestant that fails is left out.

    seconds: see `alternate`.
    """
    seeds = {who: itertools.count(1) for who in contestants.available}  # every run has tokens that no cache holds

    def run(who: str, condition: str) -> Run:
        with neighbours(CONDITIONS[condition]):
            return contestants.available[who](permute_tokens(next(seeds[who]), jobs, vocab_size))

    pairs = {f"{who} ({name}, {condition})": (who, condition) for who, condition in product(seeds, CONDITIONS)}
    may_fail = [label for label, (who, _) in pairs.items() if who != OURS]
    runs = {label: partial(run, *pair) for label, pair in pairs.items()}
    contest = alternate(runs, rounds, lambda made: made.rate(jobs), may_fail=may_fail, seconds=seconds)
    for label, why in contest.failed.items():
        contestants.leave_out([pairs[label][0]], why)
    for condition in CONDITIONS:
        yield from _busy_records(name, condition, contest, contestants.peers)


def _busy_records(name: str, condition: str, contest: Contest[Run], peers: Sequence[str]) -> Iterator[Record]:
    label = f"{name}, {condition}"
    ours, idle = f"{OURS} ({name}, {condition})", f"{OURS} ({name}, {IDLE})"
    medians = {who: contest.medians[f"{who} ({name}, {condition})"] for who in peers}
    yield Record(label, contest.medians[ours], "tokens/s", peers=medians)
    if condition == IDLE:
        return
    yield contest.ratio(f"{label}: share of idle", ours, idle, MIN_SHARE)
    if medians:
        best = max(medians, key=lambda who: medians[who])
        theirs = f"{best} ({name}, {condition})"
        yield contest.ratio(f"{label}: times {best}, the best peer", ours, theirs, MIN_SPEEDUP)
    else:
        yield not_measured(f"{label}: times the best peer", "no peer")
    slower = p99_between_tokens(contest.runs[ours]) / p99_between_tokens(contest.runs[idle])
    yield Record(f"{label}: p99 between tokens", slower, LATENCY_UNIT, MAX_LATENCY)


def p99_between_tokens(runs: Sequence[Run]) -> float:
    """Return the 99th percentile of the time between tokens of a sequence, in seconds."""
    return percentile([gap for run in runs for gap in between(run.stamps)], 0.99)


# --- our engine alone -------------------------------------------------------------------------------------------------


def profile(assembly: Assembly, jobs: Sequence[Job], vocab_size: int, on: Machine | None) -> Iterator[Record]:
    """Measure the parts of our decode step. Yield how long its memory reads take at the bandwidth of this machine."""
    try:
        parts = decode_step(lambda: run_paged(assembly, permute_tokens(-2, jobs, vocab_size)), len(jobs))
    except ValueError as error:
        yield not_measured(f"{DECODE}: parts", str(error))
    else:
        yield from (Record(f"{DECODE}: {part}", 1e3 * seconds, "ms") for part, seconds in parts.items())
    if on is None:
        return
    for name, nbytes in step_bytes(assembly, jobs).items():
        yield Record(f"{DECODE}: least for {name}", 1e3 * nbytes / on.read, "ms", peers={"MB": nbytes / 1e6})


def shares(scenario: Scenario, measured: Record, assembly: Assembly, on: Machine | None) -> Iterator[Record]:
    """Yield the share of the machine's limit in decode steps, or during prompts. measured: the scenario's figures."""
    figures = {OURS: measured.value, **measured.peers} if measured.value else {}
    jobs, dtype = scenario.jobs, assembly.loaded.spec.dtype
    if scenario.figure is step_ms and figures:
        nbytes = sum(step_bytes(assembly, jobs).values())
        yield read_shares(scenario.name, {who: 1e3 * nbytes / step for who, step in figures.items()}, on)
    elif scenario.figure is prompt_rate and figures:
        length = len(jobs[0].prompt)
        flops = prompt_flops(assembly, length) / length
        yield multiply_shares(scenario.name, {who: rate * flops for who, rate in figures.items()}, dtype, on)


def through_server(options: Mapping[str, Any], rounds: int) -> Iterator[Record]:
    """Compare the engine in process with perf_analyzer's gRPC streams.

    The prefix cache is off, because rounds repeat the requests.
    """
    name, target, options = "even lengths", 0.95, dict(options) | {"enable_prefix_caching": False}
    assembly = load(options)
    tokenizer = assembly.loaded.tokenizer
    work = text_workload(workload("even", 32, len(tokenizer), assembly.limits.max_model_len - 8), tokenizer)
    with TritonServer(options.pop("model"), options) as server:
        yield from compare_served(f"{name} served", assembly, server, work, rounds, None, target)
    assembly.close()


def load_seconds(model: str, rounds: int) -> Iterator[Record]:
    """Measure the time from the start of tritonserver until the model is ready, with the options of `paged serve`."""

    def start() -> float:
        started = time.perf_counter()
        with TritonServer(model, {"device": "cpu"}):
            return time.perf_counter() - started

    contest = alternate({"load": start}, rounds)
    yield Record("load to ready", contest.medians["load"], "s", 10.0, peers=spread(contest.figures["load"]))


# --- the benchmark ----------------------------------------------------------------------------------------------------


def compare(args: Namespace, options: Mapping[str, Any], plan: TimePlan) -> Iterator[Record]:
    """Measure all scenarios, then profile our decode step once the other engines have ended."""
    machine, limits = cpu_limits(args.threads)
    yield from limits
    config = EngineConfig.from_options(options)
    assembly = assemble(config)
    settings = ("block_size", "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs")
    dtype = {"dtype": str(assembly.loaded.spec.dtype).removeprefix("torch.")}
    print_settings(OURS, dtype | {name: getattr(config, name) for name in settings})
    vocab_size, longest = assembly.loaded.spec.vocab_size, assembly.limits.max_model_len
    selected = scenarios(vocab_size, longest, args.rate, args.quick)
    steady = without_step_target(config, assembly)
    with ExitStack() as stack:
        contestants = gather(args, config, assembly, stack)
        contestants.probe()
        contestants.warm_up([replace(job, output=4) for job in selected[0].jobs[:2]])
        streams, most = stream_jobs(vocab_size, longest, args.quick), 60 * args.minutes * RUN_SHARE
        beside = (OURS, *(name for name in contestants.available if name.removesuffix(ONE_THREAD) in BUSY_PEERS))
        measured = [Part(one.name, one.jobs, (OURS, *one.ratios), 1, SCENARIO_ROUNDS) for one in selected]
        busy = [Part(f"{name}, busy", jobs, beside, BUSY_SLOWDOWN, 1) for name, jobs in streams.items()]
        for part in (*measured, *busy):
            kept = contestants.affordable(part, math.inf, most)
            plan.add(part.name, part.rounds * kept.round_seconds(part))

        def share(part: Part) -> tuple[Contestants, float]:
            seconds = plan.take(part.name)  # for more rounds; the first one may use all the time that is left
            return contestants.affordable(part, plan.left(SERVED), most), seconds

        for scenario, part in zip(selected, measured, strict=True):
            kept, seconds = share(part)
            kept.available[OURS] = partial(run_paged, steady if scenario.figure is step_ms else assembly)
            for record in run_scenario(scenario, kept, vocab_size, args.rounds, args.dtype == "float32", seconds):
                yield record
                if record.name == scenario.name:
                    yield from shares(scenario, record, assembly, machine)
        for (name, jobs), part in zip(streams.items(), busy, strict=True):
            kept, seconds = share(part)
            yield from run_busy(kept, name, jobs, vocab_size, args.rounds, seconds)
    (jobs,) = (scenario.jobs for scenario in selected if scenario.name == DECODE)
    yield from profile(steady, jobs, vocab_size, machine)
    assembly.close()


def measure(args: Namespace) -> Iterator[Record]:
    if args.level is not None:
        print_settings(OURS, limit(args.level))
    options = model_options(args.model) | {"device": "cpu", "dtype": args.dtype, "max_num_seqs": 128}
    options |= {"kv_cache_memory_bytes": KV_GIB * GIB}
    made: list[Record] = []
    plan = TimePlan(args.minutes)
    if not args.quick:
        plan.add(SERVED, SERVED_SECONDS)
    parts = [compare(args, options, plan)]
    if not args.quick:
        rounds = min(args.rounds, SERVED_ROUNDS)
        parts += [through_server(options, rounds), load_seconds(options["model"], rounds)]
    with limited_threads(args.threads):
        for record in itertools.chain.from_iterable(parts):
            made.append(record)
            yield record
    print("\n".join(target_report(made)))


def target_share(record: Record) -> float | None:
    """Return the share of its target that a figure reaches, at least 1 if it is met; None without target or figure."""
    if record.target is None or record.value is None:
        return None
    return record.target / record.value if record.unit in LESS_IS_BETTER else record.value / record.target


def target_report(records: Sequence[Record]) -> Iterator[str]:
    """Yield a line for each target: whether it is reached, or by how much it is missed."""
    for record in records:
        if record.target is None:
            continue
        if record.value is None:
            unmeasured, _, reason = record.unit.partition(": ")
            yield f"{unmeasured:16} {record.name}: {reason}"
            continue
        side = "at most" if record.unit in LESS_IS_BETTER else "at least"
        met = (target_share(record) or 0.0) >= 1
        result = "reached" if met else f"missed by {100 * abs(record.value / record.target - 1):.0f}%"
        yield f"{result:16} {record.name}: {record.value:.4g} of {side} {record.target:g} {record.unit}"


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    """Yield the parts of a decode step beside its lower bound, and the shares of the limits and of the targets."""
    parts = {
        record.name.partition(": ")[2]: record.value or 0.0
        for record in records
        if record.unit == "ms" and record.name.startswith(f"{DECODE}: ")
    }
    bounds = [name for name in parts if name.startswith("least for ")]
    yield Bars(f"{DECODE}, ms; grey: bytes / bandwidth", parts, grey=bounds)
    yield from share_panel(records)
    targets = {
        f"{record.name} ({'≤' if record.unit in LESS_IS_BETTER else '≥'} {record.target:g} {record.unit})": record
        for record in records
        if target_share(record) is not None
    }
    shares = {name: target_share(record) or 0.0 for name, record in targets.items()}
    missed = [name for name, share in shares.items() if share < 1]
    labels = [f"{record.value:.3g}" for record in targets.values()]
    yield Bars("share of each target; grey: missed", shares, missed, line=1.0, labels=labels)


def _peer_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise ArgumentTypeError(f"{unknown[0]!r}: must be one of {', '.join(PEERS)}")
    return names


CORES = usable_cores()
main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--dtype", "data type of weights", "bfloat16", choices=["bfloat16", "float32"]),
        Option(
            "--peers",
            f"engines to compare with, of {', '.join(PEERS)} (default: all)",
            list(PEERS),
            type=_peer_names,
            metavar="A,B",
        ),
        Option("--rate", "rate of requests that arrive over time", 8.0),
        Option("--threads", "threads of each engine", CORES),
        level_option(),
        minutes_option("rounds are reduced, and slow engines left out,"),
        rounds_option(5),
    ),
    quick={"rounds": 1, "peers": ["generate"]},  # other peers take a minute to load
)
