"""What the gateway with OpenAI's interface adds to the server's own gRPC stream: the same requests through both.

Latencies come from a model that takes its time, and what is added is the difference of medians that were taken in turn.
What the gateway carries comes from a model that computes nothing, as streamed tokens and as whole answers of one token.
Its processor time for each event and each whole answer holds on a busy machine, too.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from client import load
from client.serving.ports import choose_ports
from client.serving.repository import MODEL_NAME
from client.serving.tritonserver import TritonServer
from client.wire import request_values
from paged_bench import _http_load
from paged_bench._report import Record, added_latency, alternate, arguments, count, parser, publish, ratio
from paged_bench._server_load import WORDS, LoadResult, cpu_seconds
from paged_bench._workload import NULL, model_names, model_options

GRPC, GATEWAY = "gRPC", "gateway"
PATH = "/v1/completions"
PROMPT = " ".join(WORDS)
FEWEST = 4  # requests of a run, so that one stream has a median, too
NULL_TOKENS = 8  # as many of the model that computes nothing, or a run of it would be over at once
ROOT = Path(__file__).parents[1]


class Contest:
    """One server and a gateway before it, and what the gateway's process has used."""

    def __init__(self, server: TritonServer, port: int, gateway_pid: int):
        self._server = server
        self._port = port
        self._pid = gateway_pid
        self.used = 0.0  # seconds of a processor
        self.answers = 0  # or events, of the gateway

    def run(self, who: str, requests: int, streams: int, tokens: int, *, stream: bool) -> LoadResult:
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        prompts = [f"{index} {PROMPT}" for index in range(requests)]
        if who == GRPC:  # what the gateway asks for
            asks = [request_values(one, None, sampling, stream=stream) for one in prompts]
            answers = load.closed_loop(self._server.grpc_url, MODEL_NAME, asks, streams)
        else:
            bodies = [{"model": MODEL_NAME, "prompt": one, "stream": stream, **sampling} for one in prompts]
            before = cpu_seconds([self._pid])
            answers = _http_load.closed_loop(self._port, PATH, bodies, streams)
            self.used += cpu_seconds([self._pid]) - before
            self.answers += sum(len(one.stamps) for one in answers)
        return LoadResult.of([one.sent for one in answers], [one.stamps for one in answers], requests * tokens)


@contextmanager
def contest(options: dict[str, Any]) -> Iterator[Contest]:
    (port,) = choose_ports(port=0)
    with TritonServer(options.pop("model"), options) as server:
        command = [sys.executable, "-m", "client", "openai", "--url", server.grpc_url, "--port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
            try:
                if not process.stdout or not process.stdout.readline():
                    raise RuntimeError("the gateway did not start")
                found = Contest(server, port, process.pid)
                for who in (GRPC, GATEWAY):
                    found.run(who, 2, 1, 8, stream=True)  # the first requests find files and libraries cold
                found.used, found.answers = 0.0, 0
                yield found
            finally:
                process.terminate()
                process.wait()


def latencies(found: Contest, streams: int, tokens: int, rounds: int) -> list[Record]:
    loads = in_turn(
        f"{streams} streams, tokens/s", found, rounds, requests=max(FEWEST, streams), streams=streams, tokens=tokens
    )
    firsts = {who: [one.first for one in runs] for who, runs in loads.items()}
    between = {who: [one.between for one in runs] for who, runs in loads.items()}
    return [
        *added_latency(f"time to first response p50, {streams} streams", firsts, GRPC),
        *added_latency(f"time between responses p50, {streams} streams", between, GRPC),
    ]


def in_turn(
    what: str, found: Contest, rounds: int, *, requests: int, streams: int, tokens: int, stream: bool = True
) -> dict[str, list[LoadResult]]:
    loads: dict[str, list[LoadResult]] = {GRPC: [], GATEWAY: []}

    def timed(who: str) -> float:
        loads[who].append(found.run(who, requests, streams, tokens, stream=stream))
        return loads[who][-1].tokens / loads[who][-1].seconds

    alternate({f"{who}, {what}": partial(timed, who) for who in loads}, rounds)
    return loads


def carried(found: Contest, streams: int, tokens: int, requests: int, rounds: int) -> Iterator[Record]:
    """By a server whose model costs nothing."""
    for what, unit, each, stream in (
        ("streamed tokens", "tokens/s", {"requests": streams, "tokens": NULL_TOKENS * tokens}, True),
        ("whole answers of one token", "requests/s", {"requests": requests, "tokens": 1}, False),
    ):
        found.used, found.answers = 0.0, 0
        loads = in_turn(f"{NULL}, {unit}", found, rounds, streams=streams, stream=stream, **each)
        rates = {who: [one.tokens / one.seconds for one in runs] for who, runs in loads.items()}
        name = f"{what}, {streams} at once"
        for who, values in rates.items():
            yield Record(f"{name} ({who})", statistics.median(values), unit)
        yield ratio(f"{name}: {GATEWAY} / {GRPC}", rates[GATEWAY], rates[GRPC], limit=1.0)
        part = "event" if stream else "answer"
        if stream:
            tokens_of = sum(one.tokens for one in loads[GATEWAY]) / found.answers
            yield Record(f"tokens per event, {streams} at once", tokens_of, "tokens")
        yield Record(f"processor time of the gateway per {part}", 1e3 * found.used / found.answers, "ms")


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 2, "tokens": 32, "requests": 200})
    streams = args.streams or [1, 16]
    most = max(16, *streams)
    records: list[Record] = []
    with contest(model_options(args.model) | {"enable_prefix_caching": False, "max_num_seqs": most}) as found:
        for each in streams:
            records += latencies(found, each, args.tokens, args.rounds)
    options = model_options(NULL) | {"max_num_seqs": most, "enable_prefix_caching": False}
    options |= {"num_gpu_blocks_override": most * (NULL_TOKENS * args.tokens // 16 + 8), "max_num_batched_tokens": 2048}
    with contest(options) as found:
        records += carried(found, most, args.tokens, args.requests, args.rounds)
    publish(records, args.json, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("gateway", __doc__)
    add = made.add_argument
    shapes = ", ".join([NULL, *model_names()])
    add("--model", default="demo", help=f"a Hugging Face directory, 'demo', or with random weights: {shapes}")
    add("--streams", type=count, action="append", metavar="N", help="at once; may be repeated (default 1 and 16)")
    add("--tokens", type=count, default=128, metavar="N", help="that each of them gets (default 128)")
    add("--requests", type=count, default=2000, metavar="N", help="for whole answers (default 2000)")
    add("--rounds", type=count, default=5, metavar="N")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title, bars in (
        (left, "added by the gateway, ms", [one for one in records if one.name.startswith("added to ")]),
        (right, "carried, a second, where the model costs nothing", [one for one in records if "/s" in one.unit]),
    ):
        shown = [one for one in bars if one.value is not None][::-1]
        names = [one.name.removeprefix("added to ").replace(f" streams ({GATEWAY})", " streams") for one in shown]
        drawn = axes.barh(names, [one.value for one in shown], color="#76b900")
        axes.bar_label(drawn, fmt="%.3g", padding=3, fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
