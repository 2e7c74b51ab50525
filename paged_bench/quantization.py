"""Measure the accuracy and the speed of quantized weights, next to llama.cpp with the same GGUF files.

Accuracy is relative to float32, with the method and the texts of `paged bench kv_dtype`. Checkpoints are made from the
model by rounding to the nearest code, so they are less accurate than those that are calibrated. Speed is that of
streams that start together, with greedy sampling; for one stream, from its first token on. A run during which other
processes use the cores is repeated. llama.cpp runs each GGUF file with its own defaults, which round activations to 8
bits, as the engine does in 16-bit data types.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution.batch import pack
from paged_backend.execution.forward import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from paged_backend.utils.machine import usable_cores
from paged_bench._child import CHILDREN, Child
from paged_bench._cpu_contestants import first_line
from paged_bench._cpu_scenarios import output_rate, permute_tokens
from paged_bench._disturbance import MAX_LOAD, least_disturbed
from paged_bench._environments import LLAMA_CPP
from paged_bench._quantization_models import FORMATS, GGUF, QUICK, REFERENCE, engine_options, gguf_file
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
    ratio,
)
from paged_bench._workload import Contestant, Job, Run
from paged_bench.engine import run_paged
from paged_bench.kv_dtype import BLOCK_SIZE, Score, log_probabilities, windows
from paged_client.serving.repository import resolve_model

ROWS = (1, 16, 256)  # tokens of the timed steps
STREAMS = (1, 8)  # sequences
PROMPT, OUTPUT = 144, 64  # tokens of a stream
PEER = "llama.cpp"


def step(assembly: Assembly, rows: int) -> Callable[[], float]:
    """Return a function that measures a forward pass of `rows` prompt tokens, in ms."""
    request = GenerateRequest(0, (0,) * rows, SamplingParams(temperature=0.0), 0, frozenset())
    sequence = Group(request).leader
    sequence.blocks = list(range(-(-rows // BLOCK_SIZE)))
    batch = DeviceUpload(assembly.device)(
        pack(Plan((Chunk(sequence, 0, rows, sampled_sequences=(sequence,)),)), block_size=BLOCK_SIZE)
    )

    def once() -> float:
        started = time.perf_counter()
        paged_logits(assembly.loaded.model, batch, assembly.runner.kv)
        return (time.perf_counter() - started) * 1e3

    once()
    return once


class LlamaCpp:
    """llama.cpp with each GGUF file."""

    def __init__(self, threads: int, stack: ExitStack) -> None:
        LLAMA_CPP.ensure()
        self._threads, self._stack = threads, stack

    def start(self, file: Path) -> Contestant:
        """Start a process that serves a file. Raises ChildError."""
        child = self._child()
        child.load(path=str(file), num_threads=self._threads, kv_dtype="bfloat16")
        return child

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Write a file with weights of another kind. Raises ChildError."""
        child = self._child()
        child.quantize(source=str(source), target=str(target), kind=kind, num_threads=self._threads)
        child.close()

    def _child(self) -> Child:
        log = LLAMA_CPP.directory / "llama_cpp_child.log"
        child = Child([LLAMA_CPP.python, CHILDREN / "llama_cpp_child.py"], log)
        self._stack.callback(child.close)
        return child


def accuracy(models: Mapping[str, Assembly], texts: Sequence[Sequence[int]]) -> list[Record]:
    """Compare the log probabilities of each model with those of the reference."""
    scores = {name: Score() for name in models}
    for window in texts:
        following = torch.tensor(window[1:])
        found = {name: log_probabilities(one, one.runner.kv, window)[:-1] for name, one in models.items()}
        for name, score in scores.items():
            score.add(found[name], found[REFERENCE], following)
    print(f"{len(texts)} windows of {len(texts[0])} tokens, {scores[REFERENCE].positions} next tokens")
    records = []
    for name, score in scores.items():
        records += [
            Record(f"KL divergence {name}", score.divergence / score.positions, "nats", limit=0.0),
            Record(f"same top token {name}", 100 * score.agreed / score.positions, "%", limit=100.0),
            Record(f"perplexity {name}", math.exp(score.surprise / score.positions), ""),
        ]
    return records


def speed(models: Mapping[str, Assembly], peers: Mapping[str, Contestant], streams: int, rounds: int) -> list[Record]:
    """Measure the output tokens per second of streams, for one stream from its first token on, and compare the tokens
    with those of llama.cpp."""
    first = next(iter(models.values()))
    vocab_size, limit = first.loaded.spec.vocab_size, first.limits.max_model_len
    rng, output = random.Random(streams), min(OUTPUT, limit // 2)
    jobs = [
        Job([rng.randrange(vocab_size) for _ in range(min(PROMPT, limit - output))], output) for _ in range(streams)
    ]
    runs: dict[str, list[Run]] = {}
    loads: list[float] = []

    def timed(name: str, run: Contestant) -> float:
        made = runs.setdefault(name, [])
        child = run.pid if isinstance(run, Child) else None
        result, load = least_disturbed(partial(run, permute_tokens(len(made), jobs, vocab_size)), child)
        made.append(result)
        loads.append(load)
        return output_rate(made[-1], jobs) if streams > 1 else decode_rate(made[-1])

    contestants: dict[str, Contestant] = {name: partial(run_paged, one) for name, one in models.items()}
    contestants |= {f"{PEER}, {name}": one for name, one in peers.items()}
    figures = alternate({name: partial(timed, name, one) for name, one in contestants.items()}, rounds)
    label = "1 stream" if streams == 1 else f"{streams} streams"
    disturbed = 100 * sum(load > MAX_LOAD for load in loads) / len(loads)
    records = [Record(f"{label}: runs beside other processes", disturbed, "%", limit=0.0)]
    for name in models:
        theirs = figures.get(f"{PEER}, {name}")
        spread = {"p10": percentile(figures[name], 0.1), "p90": percentile(figures[name], 0.9)}
        spread |= {PEER: statistics.median(theirs)} if theirs else {}
        records.append(Record(f"{label} {name}", statistics.median(figures[name]), "tokens/s", peers=spread))
        if theirs:
            target = 1.0 if streams == 1 and "Q4" in name else None
            records.append(ratio(f"{label} {name}: times {PEER}", figures[name], theirs, target))
            share = 100 * same_tokens(runs[name], runs[f"{PEER}, {name}"])
            records.append(
                Record(f"{label} {name}: tokens as {PEER}", share, "% before the first difference", limit=100.0)
            )
    return records


def decode_rate(run: Run) -> float:
    """Return the tokens per second of a single stream after its first token."""
    (stamps,) = run.stamps
    return (len(stamps) - 1) / (stamps[-1] - stamps[0])


def same_tokens(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Return the share of output tokens before the first one that differs, over all requests."""
    same = total = 0
    for our_run, their_run in zip(ours, theirs, strict=True):
        for one, other in zip(our_run.outputs, their_run.outputs, strict=True):
            equal = [a == b for a, b in zip(one, other, strict=True)]
            same += equal.index(False) if False in equal else len(equal)
            total += len(equal)
    return same / total


def measure(args: Namespace, model: Path, llama_cpp: LlamaCpp | None, absent: str, scratch: Path) -> Iterator[Record]:
    """Load the model in each format, and measure all of them."""
    blocks = max(STREAMS) * -(-(PROMPT + OUTPUT + BLOCK_SIZE) // BLOCK_SIZE)
    blocks = max(blocks, -(-max(args.length, *ROWS) // BLOCK_SIZE))
    common = {
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": max(STREAMS),
    }
    common |= {"enable_prefix_caching": False}
    models: dict[str, Assembly] = {}
    for name in dict.fromkeys((REFERENCE, *args.formats)):
        print(f"{name}: loading ...", file=sys.stderr, flush=True)
        try:
            options = engine_options(name, model, scratch, llama_cpp.quantize if llama_cpp else None)
        except ValueError as error:
            yield not_measured(name, str(error))
            continue
        models[name] = assemble(EngineConfig.from_options(options | common))
        limit = models[name].limits.max_model_len
        if args.length > limit:
            raise ValueError(f"argument --length: {args.length}: must be at most {limit}, as long as a sequence can be")
    peers: dict[str, Contestant] = {}
    for name in GGUF.keys() & models.keys():
        if llama_cpp is None:
            yield not_measured(f"{name}: times {PEER}", absent)
        else:
            peers[name] = llama_cpp.start(gguf_file(name, llama_cpp.quantize))
    yield from accuracy(models, windows(models[REFERENCE], args.windows, args.length))
    longest = models[REFERENCE].limits.max_model_len
    for rows in (one for one in ROWS[: 2 if args.quick else None] if one <= longest):
        figures = alternate({name: step(one, rows) for name, one in models.items()}, 3 if args.quick else 15)
        yield from (Record(f"step of {rows} {name}", statistics.median(each), "ms") for name, each in figures.items())
    for streams in STREAMS:
        yield from speed(models, peers, streams, args.rounds)


def main(argv: Sequence[str]) -> int:
    made = parser("quantization", __doc__)
    cores = usable_cores()
    add = made.add_argument
    add("--model", default="demo", help="Hugging Face model directory with one weight file (default: demo)")
    add("--windows", type=count, default=32, metavar="N", help="number of windows (default: 32)")
    add("--length", type=count, default=512, metavar="N", help="tokens of a window (default: 512)")
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds of the streams (default: 5)")
    add("--threads", type=count, default=cores, metavar="N", help=f"threads of each engine (default: {cores})")
    add("--formats", type=names, metavar="A,B", help=f"formats, of {'; '.join(FORMATS)} (default: all)")
    add("--peers", type=_peers, default=[PEER], metavar="A", help=f'"{PEER}" (default), or "none"')
    args = arguments(made, argv, {"windows": 2, "length": 128, "rounds": 1, "formats": list(QUICK), "peers": []})
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # limits the threads of the engine
    model = Path(resolve_model(args.model))
    if args.formats is None:
        args.formats = [name for name in FORMATS if name not in GGUF or args.model == "demo"]
    if args.model != "demo" and (files := [name for name in args.formats if name in GGUF]):
        made.error(f"argument --formats: {files[0]}: only the demo model is available as a GGUF file")
    records = Records(args)
    with ExitStack() as stack:
        llama_cpp, absent = None, f"{PEER} is not among --peers"
        if args.peers and set(args.formats) & GGUF.keys():
            try:
                llama_cpp = LlamaCpp(args.threads, stack)
            except Exception as error:
                absent = first_line(error)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            records += measure(args, model, llama_cpp, absent, scratch)
        except ValueError as error:
            made.error(str(error))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def names(text: str) -> list[str]:
    """Parse formats, separated by commas, which one of the names has."""
    parts = [part.strip() for part in text.split(",")]
    found: list[str] = []
    for part in parts:
        if found and f"{found[-1]}, {part}" in FORMATS:
            found[-1] += f", {part}"
        elif part in FORMATS:
            found.append(part)
        else:
            raise ArgumentTypeError(f"{part!r}: must be one of {'; '.join(FORMATS)}")
    return found


def _peers(text: str) -> list[str]:
    if text not in (PEER, "none"):
        raise ArgumentTypeError(f'{text!r}: must be "{PEER}" or "none"')
    return [] if text == "none" else [text]


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    by_name = {record.name: record for record in records}
    names = [name for name in FORMATS if f"KL divergence {name}" in by_name]
    panels = {
        "KL divergence": "KL divergence from float32, nats",
        "same top token": "same top token as float32, %",
        "1 stream": "1 stream, tokens/s",
        "8 streams": "8 streams, tokens/s",
    }
    figure = Figure(figsize=(3.4 * len(panels), 0.32 * len(names) + 1), layout="constrained")
    for axes, (prefix, title) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        found = [by_name[f"{prefix} {name}"] for name in names]
        bars = axes.barh(range(len(names)), [one.value or 0.0 for one in found], color="#76b900", label="paged")
        axes.bar_label(bars, fmt="{:,.3g}", padding=3, fontsize=7)
        theirs = [(place, one.peers[PEER]) for place, one in enumerate(found) if PEER in one.peers]
        if theirs:
            axes.plot([value for _, value in theirs], [place for place, _ in theirs], "k|", ms=12, label=PEER)
            axes.legend(fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.15)
    axes.invert_yaxis()
    figure.text(0, -0.04, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
