"""Measure the overhead of OpenAI-compatible endpoints over gRPC streams: the gateway, and Dynamo's frontend and worker.

The same requests go to the same server over gRPC, through the gateway, and through Dynamo's frontend with a worker, in
alternating rounds. Client, endpoints and server share the cores of this machine. Three models tell their costs apart:

- A real model, whose steps also need the cores.
- Steps that wait without computing, as those on a GPU do: the latency that is added while cores are free.
- A model that computes nothing: the capacity, for streamed tokens and for whole responses of one token.

The processor time of the endpoints per event and per response is also valid on a busy machine.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paged_bench._engine import MODELS, NULL, WORDS, model_options, shape_option
from paged_bench._harness import Bars, Benchmark, Contest, Option, Record, alternate, figures, rounds_option
from paged_bench._servers import (
    LoadResult,
    RunningGateway,
    added_latency,
    cpu_seconds,
    dynamo,
    gateway,
    http_closed_loop,
)
from paged_client import load
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import request_values

GRPC, GATEWAY, DYNAMO = "gRPC", "gateway", "Dynamo"
PROMPT = " ".join(WORDS)
MIN_REQUESTS = 4  # minimum per run, so that there is a median for a single stream
PER_STREAM = 4  # requests of each stream in a run with latencies
SLOWER = 4  # how many times fewer tokens a real model generates
NULL_FACTOR = 8  # how many times more tokens the null model generates, for runs that are long enough
THROUGHPUT, ADDED_MS = 0.97, 10.0  # targets: share of gRPC's throughput, and what is added to the first response


@dataclass(frozen=True)
class Requests:
    """The requests of a run. lengths: output tokens of each."""

    lengths: Sequence[int]
    streams: int  # requests that are open at any time
    stream: bool = True

    @classmethod
    def equal(cls, count: int, streams: int, tokens: int, *, stream: bool = True) -> Requests:
        return cls([tokens] * count, streams, stream)

    @classmethod
    def varied(cls, streams: int, tokens: int) -> Requests:
        """Return requests of about `tokens` output tokens, so that they do not start together."""
        count, rng = max(MIN_REQUESTS, PER_STREAM * streams), random.Random(0)
        return cls([rng.randint(tokens // 2, tokens * 3 // 2) for _ in range(count)], streams)


@dataclass(frozen=True)
class Paths:
    """A server, and endpoints in front of it."""

    server: TritonServer
    endpoints: Mapping[str, RunningGateway]

    def run(self, path: str, requests: Requests) -> LoadResult:
        """Run requests over GRPC or through an endpoint."""
        prompts = [
            (f"{index} {PROMPT}", {"max_tokens": tokens, "temperature": 0, "ignore_eos": True})
            for index, tokens in enumerate(requests.lengths)
        ]
        if path == GRPC:  # the same request as the gateway sends
            items = [request_values(prompt, None, sampling, stream=requests.stream) for prompt, sampling in prompts]
            times = load.closed_loop(self.server.grpc_url, MODEL_NAME, items, requests.streams)
        else:
            common = {"model": MODEL_NAME, "stream": requests.stream}
            bodies = [{**common, "prompt": prompt, **sampling} for prompt, sampling in prompts]
            times = http_closed_loop(self.endpoints[path].port, "/v1/completions", bodies, requests.streams)
        return LoadResult.of(times, sum(requests.lengths))

    def compare(self, requests: Requests, rounds: int, label: str) -> Contest[LoadResult]:
        contestants = {path: partial(self.run, path, requests) for path in (GRPC, *self.endpoints)}
        return alternate(contestants, rounds, LoadResult.rate, label=label)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time of each endpoint so far."""
        return {path: cpu_seconds(endpoint.pids) for path, endpoint in self.endpoints.items()}


@contextmanager
def started(options: Mapping[str, Any]) -> Iterator[Paths]:
    """Start a server and the endpoints."""
    own = dict(options)
    with (
        TritonServer(own.pop("model"), own, engine_only=True) as server,
        gateway(server) as one,
        dynamo([server], options) as other,
    ):
        paths = Paths(server, {GATEWAY: one, DYNAMO: other})
        for path in (GRPC, *paths.endpoints):
            paths.run(path, Requests.equal(2, 1, 8))  # warm up: files and libraries are not cached yet
        yield paths


@dataclass(frozen=True)
class Comparison:
    """What is compared on one server."""

    what: str  # begin of the names of all figures
    unit: str = "tokens/s"
    part: str = "event"  # what a response is called
    latency: bool = False  # whether added latencies are figures, too
    goal: bool = False  # whether Dynamo has targets

    def measure(self, paths: Paths, requests: Requests, rounds: int) -> Iterator[Record]:
        """Run the requests over all paths."""
        name = f"{self.what}, {requests.streams} at once"
        before = paths.cpu_seconds()
        contest = paths.compare(requests, rounds, f"{{}}, {name}, {self.unit}")
        after = paths.cpu_seconds()
        yield from contest.records(f"{name} ({{}})", self.unit)
        for path in paths.endpoints:
            target = THROUGHPUT if self.goal and path == DYNAMO else None
            yield contest.ratio(f"{name}: {path} / {GRPC}", path, GRPC, target, 1.0)
            messages = sum(run.responses for run in contest.runs[path])
            if requests.stream:
                tokens = sum(run.tokens for run in contest.runs[path])
                yield Record(f"tokens per event, {name} ({path})", tokens / messages, "tokens")
            milliseconds = 1e3 * (after[path] - before[path]) / messages
            yield Record(f"processor time per {self.part}, {name} ({path})", milliseconds, "ms")
        if self.latency:
            yield from added_latency(contest, GRPC, name, first={DYNAMO: ADDED_MS} if self.goal else {})


def paced(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the engine options of a null model whose steps wait so long. directory: where it is made."""
    shutil.copytree(MODELS / NULL, directory)
    config = json.loads((directory / "config.json").read_text()) | {"step_seconds": seconds}
    (directory / "config.json").write_text(json.dumps(config))
    return model_options(NULL) | {"model": str(directory)}


def measure(args: Namespace) -> Iterator[Record]:
    most = max(args.streams)
    options = {"enable_prefix_caching": False, "max_num_seqs": most}
    with started(model_options(args.model) | options) as paths:
        for streams in args.streams:
            requests = Requests.varied(streams, max(2, args.tokens // SLOWER))
            yield from Comparison("real model", latency=True).measure(paths, requests, args.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        waiting = paced(Path(scratch, NULL), args.step_ms / 1e3)
        with started(waiting | options | {"num_gpu_blocks_override": most * (args.tokens // 8 + 8)}) as paths:
            requests = Requests.varied(most, args.tokens)
            named = Comparison(f"steps that wait {args.step_ms:g} ms", latency=True, goal=True)
            yield from named.measure(paths, requests, args.rounds)
    tokens = NULL_FACTOR * args.tokens
    blocks = {"num_gpu_blocks_override": most * (tokens // 16 + 8), "max_num_batched_tokens": 2048}
    with started(model_options(NULL) | options | blocks) as paths:
        streamed = Requests.equal(most, most, tokens)
        yield from Comparison("streamed tokens").measure(paths, streamed, args.rounds)
        whole = Requests.equal(args.requests, most, 1, stream=False)
        yield from Comparison("whole answers of one token", "requests/s", "answer").measure(paths, whole, args.rounds)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    yield Bars(
        "added to the time to the first response, ms", figures(records, "added to time to first response p50, (.*)")
    )
    yield Bars("throughput over gRPC", figures(records, rf"(.*) / {GRPC}"), line=THROUGHPUT)
    yield Bars("processor time per response, ms", figures(records, "processor time per (.*)"))


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option("demo", NULL),
        Option("--streams", "number of concurrent streams", [1, 32], many=True),
        Option("--tokens", "output tokens of each stream", 128),
        Option("--step-ms", "time of a step that waits, in ms", 20.0),
        Option("--requests", "number of non-streaming requests", 2000),
        rounds_option(5),
    ),
    quick={"rounds": 2, "tokens": 32, "requests": 200},
)
