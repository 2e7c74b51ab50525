"""Measure the overhead of the OpenAI-compatible gateway over the server's gRPC streams.

The same requests go through both. Added latency is the difference of medians of alternating runs with a real model. The
capacity is measured with a model that computes nothing, for streamed tokens and for whole responses of one token. The
gateway's CPU time per event and per response is also valid on a busy machine.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paged_bench import _chart, _http_load
from paged_bench._gateways import gateway
from paged_bench._report import Record, Records, added_latency, alternate, arguments, count, parser, publish, ratio
from paged_bench._server_load import WORDS, LoadResult, cpu_seconds
from paged_bench._workload import NULL, model_names, model_options
from paged_client import load
from paged_client.serving.repository import MODEL_NAME
from paged_client.serving.tritonserver import TritonServer
from paged_client.wire import request_values

GRPC, GATEWAY = "gRPC", "gateway"
PATH = "/v1/completions"
PROMPT = " ".join(WORDS)
MIN_REQUESTS = 4  # minimum per run, so that there is a median for a single stream
NULL_FACTOR = 8  # how many times more tokens the null model generates, so that a run is long enough


class Setup:
    """A server and a gateway in front of it, and the CPU time that the gateway has used."""

    def __init__(self, server: TritonServer, port: int, gateway_pid: int) -> None:
        self._server = server
        self._port = port
        self._pid = gateway_pid
        self.cpu_seconds = 0.0  # CPU time of the gateway
        self.messages = 0  # events or whole responses of the gateway

    def reset(self) -> None:
        self.cpu_seconds, self.messages = 0.0, 0

    def run(self, path: str, requests: int, streams: int, tokens: int, *, stream: bool) -> LoadResult:
        """Run requests over GRPC or through the GATEWAY, `streams` at a time."""
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        prompts = [f"{index} {PROMPT}" for index in range(requests)]
        if path == GRPC:  # the same request as the gateway sends
            items = [request_values(one, None, sampling, stream=stream) for one in prompts]
            times = load.closed_loop(self._server.grpc_url, MODEL_NAME, items, streams)
        else:
            bodies = [{"model": MODEL_NAME, "prompt": one, "stream": stream, **sampling} for one in prompts]
            before = cpu_seconds([self._pid])
            times = _http_load.closed_loop(self._port, PATH, bodies, streams)
            self.cpu_seconds += cpu_seconds([self._pid]) - before
            self.messages += sum(len(one.stamps) for one in times)
        return LoadResult.of([one.sent for one in times], [one.stamps for one in times], requests * tokens)


@contextmanager
def started(options: dict[str, Any]) -> Iterator[Setup]:
    """Start a server and a gateway."""
    with TritonServer(options.pop("model"), options, engine_only=True) as server, gateway([server]) as running:
        setup = Setup(server, running.port, running.pid)
        for path in (GRPC, GATEWAY):
            setup.run(path, 2, 1, 8, stream=True)  # warm up: files and libraries are not cached yet
        setup.reset()
        yield setup


def latencies(setup: Setup, streams: int, tokens: int, rounds: int) -> list[Record]:
    """Measure the latencies of both paths with `streams` concurrent streams."""
    requests = max(MIN_REQUESTS, streams)
    loads = run_alternately(
        f"{streams} streams, tokens/s", setup, rounds, requests=requests, streams=streams, tokens=tokens
    )
    firsts = {path: [one.first for one in runs] for path, runs in loads.items()}
    between = {path: [one.between for one in runs] for path, runs in loads.items()}
    return [
        *added_latency(f"time to first response p50, {streams} streams", firsts, GRPC),
        *added_latency(f"time between responses p50, {streams} streams", between, GRPC),
    ]


def run_alternately(
    what: str, setup: Setup, rounds: int, *, requests: int, streams: int, tokens: int, stream: bool = True
) -> dict[str, list[LoadResult]]:
    loads: dict[str, list[LoadResult]] = {GRPC: [], GATEWAY: []}

    def timed(path: str) -> float:
        loads[path].append(setup.run(path, requests, streams, tokens, stream=stream))
        return loads[path][-1].tokens / loads[path][-1].seconds

    alternate({f"{path}, {what}": partial(timed, path) for path in loads}, rounds)
    return loads


def capacity(setup: Setup, streams: int, tokens: int, requests: int, rounds: int) -> Iterator[Record]:
    """Measure the throughput of both paths with a model that computes nothing, and the CPU time of the gateway."""
    for what, unit, sizes, stream in (
        ("streamed tokens", "tokens/s", {"requests": streams, "tokens": NULL_FACTOR * tokens}, True),
        ("whole answers of one token", "requests/s", {"requests": requests, "tokens": 1}, False),
    ):
        setup.reset()
        loads = run_alternately(f"{NULL}, {unit}", setup, rounds, streams=streams, stream=stream, **sizes)
        rates = {path: [one.tokens / one.seconds for one in runs] for path, runs in loads.items()}
        name = f"{what}, {streams} at once"
        for path, values in rates.items():
            yield Record(f"{name} ({path})", statistics.median(values), unit)
        yield ratio(f"{name}: {GATEWAY} / {GRPC}", rates[GATEWAY], rates[GRPC], limit=1.0)
        part = "event" if stream else "answer"
        if stream:
            tokens_per_event = sum(one.tokens for one in loads[GATEWAY]) / setup.messages
            yield Record(f"tokens per event, {streams} at once", tokens_per_event, "tokens")
        yield Record(f"processor time of the gateway per {part}", 1e3 * setup.cpu_seconds / setup.messages, "ms")


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 2, "tokens": 32, "requests": 200})
    streams = args.streams or [1, 16]
    most = max(16, *streams)
    records = Records(args)
    with started(model_options(args.model) | {"enable_prefix_caching": False, "max_num_seqs": most}) as setup:
        for each in streams:
            records += latencies(setup, each, args.tokens, args.rounds)
    options = model_options(NULL) | {"max_num_seqs": most, "enable_prefix_caching": False}
    options |= {"num_gpu_blocks_override": most * (NULL_FACTOR * args.tokens // 16 + 8), "max_num_batched_tokens": 2048}
    with started(options) as setup:
        records += capacity(setup, most, args.tokens, args.requests, args.rounds)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("gateway", __doc__)
    add = made.add_argument
    shapes = ", ".join([NULL, *model_names()])
    add(
        "--model",
        default="demo",
        help=f"Hugging Face model directory, 'demo', or a shape with random weights: {shapes} (default: demo)",
    )
    add(
        "--streams",
        type=count,
        action="append",
        metavar="N",
        help="number of concurrent streams; may be repeated (default: 1 and 16)",
    )
    add("--tokens", type=count, default=128, metavar="N", help="output tokens of each stream (default: 128)")
    add("--requests", type=count, default=2000, metavar="N", help="number of non-streaming requests (default: 2000)")
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    figure, axes = _chart.panels(2, 4)
    for each, title, found in (
        (axes[0], "added by the gateway, ms", [one for one in records if one.name.startswith("added to ")]),
        (axes[1], "capacity per second with the null model", [one for one in records if "/s" in one.unit]),
    ):
        values = {
            one.name.removeprefix("added to ").replace(f" streams ({GATEWAY})", " streams"): one.value
            for one in found
            if one.value is not None
        }
        _chart.bars(each, values, title)
    _chart.save(figure, file, caption)
