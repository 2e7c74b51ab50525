"""Measure the accuracy and the speed of quantized weights, next to llama.cpp with the same GGUF files.

Accuracy is relative to float32, with the method and the texts of `paged bench kv_dtype`. Checkpoints are made from the
model by rounding to the nearest code, so they are less accurate than calibrated ones. Speed is measured with streams
that start together, with greedy sampling; for one stream, from its first token on. A run during which other processes
use the cores is repeated. llama.cpp runs each GGUF file with its own defaults, which round activations to 8 bits, as
the engine does in 16-bit data types.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.utils.machine import busy_seconds, usable_cores
from paged_bench._checkpoints import (
    CheckpointFormat,
    awq_format,
    block_fp8_format,
    float8_format,
    gptq_format,
    int8_format,
    packed_format,
    quantize_directory,
)
from paged_bench._engine import OURS, Contestant, Job, Run, load, permute_tokens, run_paged
from paged_bench._harness import (
    Bars,
    Benchmark,
    InvalidArgument,
    Option,
    Record,
    TimePlan,
    alternate,
    figures,
    first_line,
    minutes_option,
    model_option,
    not_measured,
    rounds_option,
    spread,
)
from paged_bench._levels import level_option, limit, limited_threads
from paged_bench._limits import (
    Machine,
    cpu_limits,
    factor_type,
    multiply_shares,
    prompt_flops,
    read_shares,
    share_panel,
    step_bytes,
)
from paged_bench._peers import AS_PACKAGED, Child, LlamaCpp, demo_gguf, print_settings, quantized_gguf
from paged_bench.kv_dtype import BLOCK_SIZE, accuracy, windows
from paged_client.serving.repository import resolve_model

ROWS = (1, 16, 256)  # tokens of the timed steps
STREAMS = (1, 8, 32)  # sequences
ACCURACY, STEPS = "accuracy", "steps"  # parts of the plan, beside streams
PARTS = {ACCURACY: 2, STEPS: 1, "1 stream": 1, "8 streams": 2, "32 streams": 4}  # share of the time
OVER_BFLOAT16 = {"int8": None, "int4": 2.2}  # targets of one stream, relative to bfloat16
PROMPT, OUTPUT = 144, 64  # tokens of a stream
PEER = "llama.cpp"
MAX_LOAD = 0.25  # average number of cores that other processes may keep busy during a run
ATTEMPTS = 3  # maximum number of times that a run is made
Options = dict[str, object]  # options of the engine
REFERENCE = "float32"
ROUNDED: Mapping[str, Options] = {  # formats that the engine makes while loading
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, groups of 128": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},  # groups of 32
}
CHECKPOINTS: Mapping[str, CheckpointFormat] = {
    "AWQ": awq_format(32),
    "GPTQ": gptq_format(4, 32, False),
    "GPTQ desc_act": gptq_format(4, 32, False, desc_act=True),
    "GPTQ 8 bits": gptq_format(8, 32, True),
    "W4A16": packed_format(32),
    "W8A8": int8_format(),  # activations stay in bfloat16
    "FP8 tensor": float8_format("tensor", 0, 0),
    "FP8 channel": float8_format("channel", 1, 0),
    "FP8 blocks": block_fp8_format(64),
}
GGUF = {f"GGUF {kind}": kind for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", AS_PACKAGED)}
FORMATS = [*ROUNDED, *CHECKPOINTS, *GGUF]
QUICK = [REFERENCE, "bfloat16", "int4", "AWQ"]


def gguf_file(name: str, llama_cpp: LlamaCpp | None) -> Path:
    """Return the file of a GGUF format, which llama.cpp creates if necessary. Raises ValueError without llama.cpp."""
    kind = GGUF[name]
    if kind == AS_PACKAGED:
        return demo_gguf(kind)

    def make(source: Path, made: Path) -> None:
        if llama_cpp is None:
            raise ValueError(f"{name} is made by llama.cpp, which is not among --peers")
        llama_cpp.quantize(source, made, kind)

    return quantized_gguf(kind, make)


def engine_options(name: str, model: Path, scratch: Path, llama_cpp: LlamaCpp | None) -> Options:
    """Return the options of the engine for a format, and write its files to `scratch` if necessary."""
    if name in ROUNDED:
        return {"model": str(model)} | ROUNDED[name]
    if name in GGUF:
        return {"model": str(gguf_file(name, llama_cpp)), "tokenizer": str(model), "dtype": "bfloat16"}
    target = scratch / name
    quantize_directory(model, target, CHECKPOINTS[name])
    return {"model": str(target), "dtype": "bfloat16"}


def step(assembly: Assembly, rows: int) -> Callable[[], float]:
    """Return a function that measures a forward pass of `rows` prompt tokens, in ms."""
    request = GenerateRequest(0, (0,) * rows, SamplingParams(temperature=0.0), 0, frozenset())
    sequence = Group(request).leader
    sequence.tables = [list(range(-(-rows // BLOCK_SIZE)))]
    batch = DeviceUpload(assembly.device)(
        pack(Plan((Chunk(sequence, 0, rows, sampled_sequences=(sequence,)),)), block_size=BLOCK_SIZE)
    )

    def once() -> float:
        started = time.perf_counter()
        paged_logits(assembly.loaded.model, batch, assembly.runner.kv)
        return (time.perf_counter() - started) * 1e3

    once()
    return once


@dataclass(frozen=True)
class LoadedRun:
    """A run, and how many cores other processes kept busy meanwhile; 0 if the system does not tell."""

    run: Run
    load: float


def least_disturbed(run: Callable[[], Run], child: int | None = None) -> LoadedRun:
    """Run up to ATTEMPTS times, until other processes keep at most MAX_LOAD cores busy. Return the run with the least
    load of other processes.

    child: the process that computes, if it is not this one.
    """
    best: LoadedRun | None = None
    for _ in range(ATTEMPTS):
        started, before = time.monotonic(), other_cpu_seconds(child)
        result = run()
        elapsed, after = time.monotonic() - started, other_cpu_seconds(child)
        load = 0.0 if before is None or after is None else max(0.0, after - before) / max(elapsed, 1e-9)
        if best is None or load < best.load:
            best = LoadedRun(result, load)
        if load <= MAX_LOAD:
            break
        print(f"other processes used {load:.2g} cores ...", end=" ", file=sys.stderr, flush=True)
    assert best is not None
    return best


def other_cpu_seconds(child: int | None) -> float | None:
    """Return the CPU time that processes other than this one and `child` have used on the cores of the CPU affinity.

    Returns None where the system does not tell. Processes with a positive nice value count only if this one has one.
    """
    try:
        busy = busy_seconds(os.sched_getaffinity(0), include_nice=os.nice(0) > 0)
        return busy - time.process_time() - (_cpu_seconds(child) if child is not None else 0.0)
    except (OSError, ValueError):
        return None


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


def speed(
    models: Mapping[str, Assembly],
    peers: Mapping[str, Contestant],
    streams: int,
    rounds: int,
    on: Machine | None,
    seconds: float = math.inf,
) -> Iterator[Record]:
    """Measure the output tokens per second of streams, for one stream from its first token on, and compare the tokens
    with llama.cpp's. on: for the share of the memory bandwidth of one stream. seconds: see `alternate`."""
    first = next(iter(models.values()))
    vocab_size, limit = first.loaded.spec.vocab_size, first.limits.max_model_len
    rng, output = random.Random(streams), min(OUTPUT, limit // 2)
    jobs = [
        Job([rng.randrange(vocab_size) for _ in range(min(PROMPT, limit - output))], output) for _ in range(streams)
    ]

    def undisturbed(run: Contestant, seeds: Iterator[int]) -> LoadedRun:
        child = run.pid if isinstance(run, Child) else None
        return least_disturbed(partial(run, permute_tokens(next(seeds), jobs, vocab_size)), child)

    def figure(made: LoadedRun) -> float:
        return made.run.rate(jobs) if streams > 1 else decode_rate(made.run)

    contestants: dict[str, Contestant] = {name: partial(run_paged, assembly) for name, assembly in models.items()}
    contestants |= {f"{PEER}, {name}": peer for name, peer in peers.items()}
    runs = {name: partial(undisturbed, run, iter(range(rounds))) for name, run in contestants.items()}
    contest, label = alternate(runs, rounds, figure, seconds=seconds), _label(streams)
    loads = [made.load for runs in contest.runs.values() for made in runs]
    disturbed = 100 * sum(load > MAX_LOAD for load in loads) / len(loads)
    yield Record(f"{label}: runs beside other processes", disturbed, "%", limit=0.0)
    for name in models:
        theirs = f"{PEER}, {name}"
        others = spread(contest.figures[name]) | ({PEER: contest.medians[theirs]} if name in peers else {})
        yield Record(f"{label} {name}", contest.medians[name], "tokens/s", peers=others)
        if name in peers:
            yield contest.ratio(f"{label} {name}: times {PEER}", name, theirs, 1.0)
            share = 100 * same_tokens(*([made.run for made in contest.runs[who]] for who in (name, theirs)))
            yield Record(f"{label} {name}: tokens as {PEER}", share, "% before the first difference", limit=100.0)
    for name, model in models.items() if streams == 1 else ():
        nbytes = sum(step_bytes(model, jobs).values())
        yield read_shares(f"{label} {name}", {OURS: nbytes * contest.medians[name]}, on)
    if streams == 1 and "bfloat16" in models:
        for name in OVER_BFLOAT16.keys() & models.keys():
            yield contest.ratio(f"{label} {name}: times bfloat16", name, "bfloat16", OVER_BFLOAT16[name])


def _label(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def decode_rate(run: Run) -> float:
    """Return the tokens per second of a single stream after its first token."""
    (stamps,) = run.stamps
    return (len(stamps) - 1) / (stamps[-1] - stamps[0])


def same_tokens(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Return the share of output tokens before the first one that differs, over all requests."""
    same = total = 0
    for our_run, their_run in zip(ours, theirs, strict=True):
        for own, other in zip(our_run.outputs, their_run.outputs, strict=True):
            equal = [a == b for a, b in zip(own, other, strict=True)]
            same += equal.index(False) if False in equal else len(equal)
            total += len(equal)
    return same / total


def measure(args: Namespace) -> Iterator[Record]:
    formats = args.formats or [name for name in FORMATS if name not in GGUF or args.model == "demo"]
    if args.model != "demo" and (files := [name for name in formats if name in GGUF]):
        raise InvalidArgument(f"argument --formats: {files[0]}: only the demo model is available as a GGUF file")
    if args.level is not None:
        print_settings(OURS, limit(args.level))
    plan = TimePlan(args.minutes)
    for part, share in PARTS.items():
        plan.add(part, share)
    with ExitStack() as stack:
        stack.enter_context(limited_threads(args.threads))
        llama_cpp, absent = None, f"{PEER} is not among --peers"
        if args.peers and set(formats) & GGUF.keys():
            try:
                llama_cpp = LlamaCpp(args.threads, stack, args.level)
            except Exception as error:
                absent = first_line(error)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield from compare(args, formats, llama_cpp, absent, scratch, plan)


def compare(
    args: Namespace, formats: Sequence[str], llama_cpp: LlamaCpp | None, absent: str, scratch: Path, plan: TimePlan
) -> Iterator[Record]:
    """Load the model in each format, and measure all of them. absent: why there is no llama.cpp."""
    machine, limits = cpu_limits(args.threads)
    yield from limits
    model = Path(resolve_model(args.model))
    blocks = max(STREAMS) * -(-(PROMPT + OUTPUT + BLOCK_SIZE) // BLOCK_SIZE)
    common = {
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": max(blocks, -(-max(args.length, *ROWS) // BLOCK_SIZE)),
        "max_num_seqs": max(STREAMS),
        "enable_prefix_caching": False,
    }
    models: dict[str, Assembly] = {}
    for name in dict.fromkeys((REFERENCE, *formats)):
        print(f"{name}: loading ...", file=sys.stderr, flush=True)
        try:
            options = engine_options(name, model, scratch, llama_cpp)
        except ValueError as error:
            yield not_measured(name, str(error))
            continue
        models[name] = load(options | common)
        limit = models[name].limits.max_model_len
        if args.length > limit:
            raise InvalidArgument(
                f"argument --length: {args.length}: must be at most {limit}, as long as a sequence can be"
            )
    peers: dict[str, Contestant] = {}
    for name in [name for name in models if name in GGUF]:
        if llama_cpp is None:
            yield not_measured(f"{name}: times {PEER}", absent)
        else:
            peers[name] = llama_cpp.start(gguf_file(name, llama_cpp))
    scored = {name: (engine, engine.runner.kv) for name, engine in models.items()}
    started, seconds = time.monotonic(), plan.take(ACCURACY)
    accuracy(scored, windows(models[REFERENCE], 1, args.length), REFERENCE)
    fitting = int(seconds / (time.monotonic() - started))
    texts = windows(models[REFERENCE], max(1, min(args.windows, fitting)), args.length)
    scores = accuracy(scored, texts, REFERENCE)
    for name, score in scores.items():
        yield from score.records(name, scores[REFERENCE])
    longest = models[REFERENCE].limits.max_model_len
    sizes = [rows for rows in ROWS[: 2 if args.quick else None] if rows <= longest]
    seconds = plan.take(STEPS) / len(sizes)
    for rows in sizes:
        steps = {name: step(engine, rows) for name, engine in models.items()}
        contest = alternate(steps, 3 if args.quick else 15, seconds=seconds)
        yield from contest.records(f"step of {rows} {{}}", "ms")
        for name, engine in models.items() if rows > 1 else ():
            rates = {OURS: 1e3 * prompt_flops(engine, rows) / contest.medians[name]}
            yield multiply_shares(f"step of {rows} {name}", rates, factor_type(engine), machine)
    for streams in STREAMS[: 2 if args.quick else None]:
        yield from speed(models, peers, streams, args.rounds, machine, plan.take(_label(streams)))


def names(text: str) -> list[str]:
    """Parse formats, separated by commas, which also occur in a name."""
    parts = [part.strip() for part in text.split(",")]
    parsed: list[str] = []
    for part in parts:
        if parsed and f"{parsed[-1]}, {part}" in FORMATS:
            parsed[-1] += f", {part}"
        elif part in FORMATS:
            parsed.append(part)
        else:
            raise ArgumentTypeError(f"{part!r}: must be one of {'; '.join(FORMATS)}")
    return parsed


def _peers(text: str) -> list[str]:
    if text not in (PEER, "none"):
        raise ArgumentTypeError(f'{text!r}: must be "{PEER}" or "none"')
    return [] if text == "none" else [text]


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    yield Bars("KL divergence from float32, nats", figures(records, "KL divergence (.*)"))
    yield Bars("same top token as float32, %", figures(records, "same top token (.*)"))
    for streams in ("1 stream", "8 streams", "32 streams"):
        shown: dict[str, float] = {}
        for name, value in figures(records, f"{streams} ([^:]*)").items():
            peers = next(record.peers for record in records if record.name == f"{streams} {name}")
            shown |= {name: value} | ({f"{name}, {PEER}": peers[PEER]} if PEER in peers else {})
        if not shown:  # --quick, and records of older versions
            continue
        yield Bars(f"{streams}, tokens/s", shown, grey=[name for name in shown if PEER in name])
    yield from share_panel(records)


CORES = usable_cores()
main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(help="Hugging Face model directory with one weight file"),
        Option("--windows", "number of windows", 32),
        Option("--length", "tokens of a window", 512),
        rounds_option(5),
        Option("--threads", "threads of each engine", CORES),
        level_option(),
        minutes_option("windows and rounds are reduced"),
        Option("--formats", f"formats, of {'; '.join(FORMATS)} (default: all)", type=names, metavar="A,B"),
        Option("--peers", f'"{PEER}" (default), or "none"', [PEER], type=_peers, metavar="A"),
    ),
    quick={"windows": 2, "length": 128, "rounds": 1, "formats": QUICK, "peers": []},
)
