"""The engine behind a real tritonserver: what is left of its throughput, latencies under load, and the server path's
own limit.

Load comes from perf_analyzer, with figures from the time stamps that it exports, and from a leaner client of ours
(client/load.py): where the two differ, perf_analyzer was what limited. Tokens that pile up for a stream go out as one
response, so "between responses" is what a client sees, and is as long or longer than between tokens. The null model is
an engine whose forward pass computes nothing; scheduler, sampler, detokenizer, responder and server are all real.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from client import load
from client.serving.repository import MODEL_NAME
from client.serving.server_files import perf_analyzer
from client.serving.tritonserver import TritonServer
from client.wire import Values
from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import Assembly, assemble
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
from paged_bench._workload import NULL, WORKLOADS, Job, model_names, model_options, workload
from paged_bench.engine import run_paged

IN_PROCESS, LEAN, ANALYZER = "in process", "server, lean client", "server, perf_analyzer"
ATTEMPTS = 6  # perf_analyzer 2.51 leaves an export empty or cut off now and then: see docs/measured.md
WORDS = (
    "the a of to and in that it was for on with as his her they at be this from had not are but by we you one all were"
).split()


class AnalyzerError(RuntimeError):
    """perf_analyzer has failed; the message has its own words."""


@dataclass(frozen=True)
class LoadResult:
    """What a client saw. Times in seconds."""

    tokens: int
    seconds: float  # from the first request to the last response
    responses: int
    first: list[float]  # to the first response of each request
    between: list[float]  # responses of a request

    @classmethod
    def of(cls, sent: Sequence[float], stamps: Sequence[Sequence[float]], tokens: int) -> LoadResult:
        return cls(
            tokens,
            max(one[-1] for one in stamps) - min(sent),
            sum(map(len, stamps)),
            [one[0] - begun for begun, one in zip(sent, stamps, strict=True)],
            [later - earlier for one in stamps for earlier, later in itertools.pairwise(one)],
        )

    def records(self, what: str) -> Iterator[Record]:
        yield Record(f"output_throughput {what}", self.tokens / self.seconds, "tokens/s")
        yield Record(f"tokens per response {what}", self.tokens / self.responses, "tokens")
        for name, values in (("time to first response", self.first), ("time between responses", self.between)):
            for share in (0.5, 0.99) if values else ():
                yield Record(f"{name} p{100 * share:.0f} {what}", 1e3 * percentile(values, share), "ms")


@dataclass(frozen=True)
class TextWorkload:
    """The same requests, for an engine and for a server."""

    jobs: list[Job]
    texts: list[str]

    @property
    def tokens(self) -> int:
        return sum(job.output for job in self.jobs)

    @property
    def asks(self) -> list[Values]:
        return [{"text_input": text, "stream": True, "sampling_parameters": self._sampling(job)} for text, job in self]

    @property
    def rows(self) -> str:
        """As perf_analyzer reads them."""
        return json.dumps({"data": [{name: [value] for name, value in ask.items()} for ask in self.asks]})

    def __iter__(self) -> Iterator[tuple[str, Job]]:
        return zip(self.texts, self.jobs, strict=True)

    @staticmethod
    def _sampling(job: Job) -> str:
        return json.dumps({"max_tokens": job.output, "temperature": 0, "ignore_eos": True})


def text_workload(jobs: Sequence[Job], tokenizer: Any) -> TextWorkload:
    """Words in place of random tokens, about as many: a server takes text, and both are to compute the same."""
    rnd = random.Random(0)
    texts, made = [], []
    for job in jobs:
        ids = tokenizer.encode(" ".join(rnd.choices(WORDS, k=len(job.prompt))), add_special_tokens=False)
        texts.append(tokenizer.decode(ids[: len(job.prompt)]))
        made.append(replace(job, prompt=tokenizer.encode(texts[-1])))
    return TextWorkload(made, texts)


def run_lean_client(server: TritonServer, work: TextWorkload, concurrency: int) -> LoadResult:
    answers = load.closed_loop(server.grpc_url, MODEL_NAME, work.asks, concurrency)
    return LoadResult.of([one.sent for one in answers], [one.stamps for one in answers], work.tokens)


def run_perf_analyzer(server: TritonServer, work: TextWorkload, *flags: str) -> LoadResult:
    """Every request once. With a number of requests it takes one window and asks of it no stability. Raises
    AnalyzerError."""
    found = perf_analyzer()
    assert found is not None
    binary, environment = found
    with tempfile.TemporaryDirectory() as scratch:
        rows, export = Path(scratch, "in.json"), Path(scratch, "out.json")
        rows.write_text(work.rows)
        command = [str(binary), "-m", MODEL_NAME, "-u", server.grpc_url, "-i", "grpc", "--async", "--streaming"]
        command += ["--input-data", str(rows), "--request-count", str(len(work.jobs))]
        command += ["--profile-export-file", str(export), *flags]
        for _ in range(ATTEMPTS):
            export.unlink(missing_ok=True)  # it refuses a file that is there
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                words = " ".join(done.stderr.partition("Usage: ")[0].split())  # pages of it follow an argument's error
                raise AnalyzerError(f"perf_analyzer exits with {done.returncode}: {words or 'no reason given'}")
            with contextlib.suppress(json.JSONDecodeError):
                return read_export(json.loads(export.read_text()))
    raise AnalyzerError(f"{ATTEMPTS} exports of perf_analyzer ended before their end")


def read_export(export: dict[str, Any]) -> LoadResult:
    """Its time stamps are nanoseconds. Every request ignores the end of sequence, so that it has all its tokens."""
    (experiment,) = export["experiments"]
    requests = experiment["requests"]
    assert all(request.get("success", True) for request in requests)
    tokens = sum(json.loads(one["request_inputs"]["sampling_parameters"])["max_tokens"] for one in requests)
    stamps = [[when / 1e9 for when in one["response_timestamps"]] for one in requests]
    return LoadResult.of([one["timestamp"] / 1e9 for one in requests], stamps, tokens)


def compare(
    what: str,
    assembly: Assembly,
    server: TritonServer,
    work: TextWorkload,
    rounds: int,
    target: float | None,
    ratio_target: float,
) -> list[Record]:
    """All requests at once, in process and through the server, in turn."""
    loads: dict[str, list[LoadResult]] = {LEAN: [], ANALYZER: []}
    count = len(work.jobs)
    runs: dict[str, Callable[[], LoadResult]] = {LEAN: lambda: run_lean_client(server, work, count)}
    if perf_analyzer():
        runs[ANALYZER] = lambda: run_perf_analyzer(server, work, "--concurrency-range", str(count))

    failed = {} if ANALYZER in runs else {ANALYZER: "no perf_analyzer that runs here"}

    def timed(name: str) -> float:
        try:
            loads[name].append(runs[name]())
        except AnalyzerError as error:  # must not cost the others' figures
            failed[name] = str(error)
            return math.nan
        return work.tokens / loads[name][-1].seconds

    contestants = {IN_PROCESS: lambda: work.tokens / run_paged(assembly, work.jobs).seconds}
    figures = alternate(contestants | {name: partial(timed, name) for name in runs}, rounds)
    inside = figures.pop(IN_PROCESS)
    records = [Record(f"output_throughput {what} ({IN_PROCESS})", statistics.median(inside), "tokens/s")]
    for name, values in figures.items():
        if name in failed:
            continue
        records += (
            replace(record, value=statistics.median(values), target=target)
            if record.name.startswith("output_throughput")
            else record
            for record in loads[name][-1].records(f"{what} ({name})")
        )
        records.append(ratio(f"server / in process {what} ({name})", values, inside, ratio_target, 1.0))
    return records + [not_measured(f"output_throughput {what} ({name})", why) for name, why in failed.items()]


def sweep(
    server: TritonServer, work: TextWorkload, concurrencies: Sequence[int], rates: Sequence[float]
) -> Iterator[Record]:
    if perf_analyzer() is None:
        yield not_measured("sweeps", "no perf_analyzer that runs here")
        return
    points = [(f"concurrency {one}", ["--concurrency-range", str(one)]) for one in concurrencies]
    poisson = ["--request-distribution", "poisson"]
    points += [(f"rate {one:g}/s", ["--request-rate-range", f"{one:g}", *poisson]) for one in rates]
    for name, flags in points:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            yield from run_perf_analyzer(server, work, *flags).records(name)
        except AnalyzerError as error:
            yield not_measured(f"output_throughput {name}", str(error))


def busy(server: TritonServer, run: Callable[[], LoadResult]) -> dict[str, float]:
    """Cores that each process keeps busy while `run` loads the server: whichever comes to its limit is what limits.
    That of the model is about 1, since Python runs one thread at a time."""
    model = [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]
    before, own, began = [cpu_seconds([server.pid]), cpu_seconds(model)], _own_seconds(), time.perf_counter()
    run()
    wall = time.perf_counter() - began
    after = [cpu_seconds([server.pid]), cpu_seconds(model)]
    used = [later - earlier for earlier, later in zip(before, after, strict=True)] + [_own_seconds() - own]
    return {name: one / wall for name, one in zip(("tritonserver", "model", "client"), used, strict=True)}


def cpu_seconds(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _own_seconds() -> float:
    """Of this process and the children that have ended, which perf_analyzer has."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def null_model(tokenizer: str, streams: int, tokens: int, rounds: int) -> Iterator[Record]:
    """What the path from scheduler to client carries when the model costs nothing."""
    options = model_options(NULL) | {"tokenizer": tokenizer, "max_num_seqs": streams, "enable_prefix_caching": False}
    options |= {"max_num_batched_tokens": max(2048, streams), "num_gpu_blocks_override": streams * (tokens // 16 + 4)}
    assembly = assemble(EngineConfig.from_options(options))
    work = text_workload([Job([0] * 16, tokens)] * streams, assembly.loaded.tokenizer)
    with TritonServer(options.pop("model"), options) as server:
        run_lean_client(server, work, streams)
        yield from compare(NULL, assembly, server, work, rounds, 50_000.0, 0.5)
        clients = {LEAN: partial(run_lean_client, server, work, streams)}
        if perf_analyzer():
            clients[ANALYZER] = partial(run_perf_analyzer, server, work, "--concurrency-range", str(streams))
        for name, run in clients.items():
            try:
                shares = busy(server, run)
            except AnalyzerError as error:
                yield not_measured(f"cores busy {NULL} ({name})", str(error))
                continue
            yield Record(
                f"cores busy {NULL} ({name})", sum(shares.values()), "cores", limit=os.cpu_count(), peers=shares
            )


def served(args: Any, count: int) -> Iterator[Record]:
    """The real model, or one of its shape."""
    on_gpu = torch.cuda.is_available()
    options = model_options(args.model or ("Qwen3-0.6B" if on_gpu else "demo"))
    options |= {
        "dtype": "auto" if on_gpu else "float32",
        "max_num_seqs": max(count, 16),
        "enable_prefix_caching": False,
    }
    options |= {"max_num_batched_tokens": 8192 if on_gpu else max(512, count)}
    if not on_gpu:
        options["num_gpu_blocks_override"] = 35 * max(count, 16)
    # Each counts what the other holds: the first may take 40% of a GPU's memory, the second up to 80.
    assembly = assemble(EngineConfig.from_options(options | {"gpu_memory_utilization": 0.4}))
    tokenizer, limit = assembly.loaded.tokenizer, assembly.limits.max_model_len - 8
    work = text_workload(workload(args.workload, count, len(tokenizer), limit), tokenizer)
    options |= {"gpu_memory_utilization": 0.8}
    with TritonServer(options.pop("model"), options) as server:
        run_lean_client(server, work, count)  # the first requests find files and libraries cold
        yield from compare(args.workload, assembly, server, work, args.rounds, None, 0.97)
        yield from sweep(server, work, args.concurrency or _up_to(count), args.rate or ([] if args.quick else [0.5, 1]))


def _up_to(count: int) -> list[int]:
    return [one for one in (1, 4, 16, 64, 256) if one < count]


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"requests": 2, "rounds": 1, "streams": 64, "tokens": 64})
    on_gpu = torch.cuda.is_available()
    count = args.requests or (256 if on_gpu else 16)
    args.workload = args.workload or ("sharegpt" if on_gpu else "mixed")
    records: list[Record] = []
    if not args.null:
        records += served(args, count)
    tokenizer = args.tokenizer or model_options("demo")["model"]
    records += null_model(tokenizer, args.streams, args.tokens, args.rounds)
    publish(records, args.json, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("server", __doc__.partition(":")[0])
    add = made.add_argument
    shapes = ", ".join(model_names())
    add("--model", help=f"a Hugging Face directory, 'demo', or with random weights: {shapes} (default: by machine)")
    add("--workload", choices=[name for name in WORKLOADS if name not in ("n4", "beam4")])
    add("--requests", type=count, metavar="N")
    add("--concurrency", type=count, action="append", metavar="N", help="a point of the sweep; may be repeated")
    add("--rate", type=rate, action="append", metavar="X", help="requests a second, Poisson; may be repeated")
    add("--rounds", type=count, default=5, metavar="N")
    add("--null", action="store_true", help="the null model only")
    add("--streams", type=count, default=256, metavar="N", help="of the null model (default 256)")
    add("--tokens", type=count, default=256, metavar="N", help="that each of them gets (default 256)")
    add("--tokenizer", metavar="DIR", help="of the null model (default: the demo model's)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, wanted, unit in (
        (left, "output_throughput ", "output tokens per second"),
        (right, "time to first response p50 ", "median time to first response, ms"),
    ):
        bars = [one for one in records if one.name.startswith(wanted) and one.value is not None][::-1]
        drawn = axes.barh([one.name.removeprefix(wanted) for one in bars], [one.value for one in bars], color="#76b900")
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7)
        axes.set_title(unit, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
