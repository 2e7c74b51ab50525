"""Measure the overhead of the OpenAI-compatible gateway over the server's gRPC streams.

The same requests go through both. Added latency is the difference of medians of alternating runs with a real model. The
capacity is measured with a model that computes nothing, for streamed tokens and for whole responses of one token. The
gateway's CPU time per event and per response is also valid on a busy machine.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from paged_bench._engine import NULL, WORDS, model_options, shape_option
from paged_bench._harness import Bars, Benchmark, Contest, Option, Record, alternate, figures, rounds_option
from paged_bench._servers import LoadResult, RunningGateway, added_latency, cpu_seconds, gateway, http_closed_loop
from paged_client import load
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import request_values

GRPC, GATEWAY = "gRPC", "gateway"
PROMPT = " ".join(WORDS)
MIN_REQUESTS = 4  # minimum per run, so that there is a median for a single stream
NULL_FACTOR = 8  # how many times more tokens the null model generates, for runs that are long enough


@dataclass(frozen=True)
class Requests:
    """The requests of a run."""

    count: int
    streams: int  # requests that are open at any time
    tokens: int  # tokens of each output
    stream: bool = True


@dataclass(frozen=True)
class Paths:
    """A server and a gateway in front of it."""

    server: TritonServer
    gateway: RunningGateway

    def run(self, path: str, requests: Requests) -> LoadResult:
        """Run requests over GRPC or through the GATEWAY."""
        sampling = {"max_tokens": requests.tokens, "temperature": 0, "ignore_eos": True}
        prompts = [f"{index} {PROMPT}" for index in range(requests.count)]
        if path == GRPC:  # the same request as the gateway sends
            items = [request_values(prompt, None, sampling, stream=requests.stream) for prompt in prompts]
            times = load.closed_loop(self.server.grpc_url, MODEL_NAME, items, requests.streams)
        else:
            common = {"model": MODEL_NAME, "stream": requests.stream, **sampling}
            bodies = [{**common, "prompt": prompt} for prompt in prompts]
            times = http_closed_loop(self.gateway.port, "/v1/completions", bodies, requests.streams)
        return LoadResult.of(times, requests.count * requests.tokens)

    def compare(self, requests: Requests, rounds: int, label: str) -> Contest[LoadResult]:
        contestants = {path: partial(self.run, path, requests) for path in (GRPC, GATEWAY)}
        return alternate(contestants, rounds, LoadResult.rate, label=label)


@contextmanager
def started(options: Mapping[str, Any]) -> Iterator[Paths]:
    """Start a server and a gateway."""
    own = dict(options)
    with TritonServer(own.pop("model"), own, engine_only=True) as server, gateway([server]) as running:
        paths = Paths(server, running)
        for path in (GRPC, GATEWAY):
            paths.run(path, Requests(2, 1, 8))  # warm up: files and libraries are not cached yet
        yield paths


def capacity(paths: Paths, what: str, unit: str, part: str, requests: Requests, rounds: int) -> Iterator[Record]:
    """Measure the throughput of both paths with a model that computes nothing, and the CPU time of the gateway."""
    before = cpu_seconds([paths.gateway.pid])
    contest = paths.compare(requests, rounds, f"{{}}, {NULL}, {unit}")
    seconds = cpu_seconds([paths.gateway.pid]) - before
    messages = sum(run.responses for run in contest.runs[GATEWAY])
    name = f"{what}, {requests.streams} at once"
    yield from contest.records(f"{name} ({{}})", unit)
    yield contest.ratio(f"{name}: {GATEWAY} / {GRPC}", GATEWAY, GRPC, limit=1.0)
    if requests.stream:
        tokens = sum(run.tokens for run in contest.runs[GATEWAY])
        yield Record(f"tokens per event, {requests.streams} at once", tokens / messages, "tokens")
    yield Record(f"processor time of the gateway per {part}", 1e3 * seconds / messages, "ms")


def measure(args: Namespace) -> Iterator[Record]:
    most = max(16, *args.streams)
    options = {"enable_prefix_caching": False, "max_num_seqs": most}
    with started(model_options(args.model) | options) as paths:
        for streams in args.streams:
            requests = Requests(max(MIN_REQUESTS, streams), streams, args.tokens)
            contest = paths.compare(requests, args.rounds, f"{{}}, {streams} streams, tokens/s")
            yield from added_latency(contest, GRPC, streams)
    tokens = NULL_FACTOR * args.tokens
    blocks = {"num_gpu_blocks_override": most * (tokens // 16 + 8), "max_num_batched_tokens": 2048}
    with started(model_options(NULL) | options | blocks) as paths:
        streamed, whole = Requests(most, most, tokens), Requests(args.requests, most, 1, stream=False)
        yield from capacity(paths, "streamed tokens", "tokens/s", "event", streamed, args.rounds)
        yield from capacity(paths, "whole answers of one token", "requests/s", "answer", whole, args.rounds)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    yield Bars("added by the gateway, ms", figures(records, rf"added to (.*) \({GATEWAY}\)"))
    capacities = [record for record in records if "/s" in record.unit]
    yield Bars("capacity per second with the null model", figures(capacities, "(.*)"))


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option("demo", NULL),
        Option("--streams", "number of concurrent streams", [1, 16], many=True),
        Option("--tokens", "output tokens of each stream", 128),
        Option("--requests", "number of non-streaming requests", 2000),
        rounds_option(5),
    ),
    quick={"rounds": 2, "tokens": 32, "requests": 200},
)
