"""Measure the time between tokens while long prompts arrive: one mixed server, or a prefill and a decode server.

Both contestants have the same cores. The mixed server has all of them, the prefill and the decode server a half each.
Short streaming requests run all the time, and long prompts arrive at a fixed rate that the prefill server can just keep
up with. The pair exchanges blocks through a Redis server of this machine. Client and Redis server may use all cores.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from paged_bench import _chart
from paged_bench._redis_server import RedisServer, find_redis
from paged_bench._report import Record, Records, arguments, count, not_measured, parser, percentile, publish, ratio
from paged_bench._server_load import wait_until_populated
from paged_client.async_client import AsyncClient
from paged_client.serving.repository import resolve_model
from paged_client.serving.tritonserver import TritonServer

TARGET = 0.5  # p99 of the time between tokens of the pair, relative to the mixed server
TIMEOUT_MS = 20_000  # of the store, so that other processes of the machine do not disable it
BLOCK_SIZE = 16
VOCAB = 256  # random tokens below this number, which every vocabulary has
LOAD = 1.6  # time between two long prompts, relative to the time in which the prefill server computes one
MIXED, PAIR = "mixed", "disaggregated"
NEEDS = "needs redis-server and at least 2 cores"


@dataclass
class Times:
    """What the clients have measured during one run, in seconds."""

    between: list[float] = field(default_factory=list)  # between two responses of short requests
    first: list[float] = field(default_factory=list)  # to the first token of long prompts
    cached: list[int] = field(default_factory=list)  # cached tokens of long prompts


@dataclass(frozen=True)
class Load:
    """The requests of a run."""

    seconds: float
    streams: int  # short requests at once
    prompt: int  # tokens of their prompts
    output: int  # tokens that they generate
    long: int  # tokens of a long prompt
    interval: float  # seconds between two long prompts


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Let processes that are started in the block run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Contestant:
    """The servers that answer requests: one, or a prefill server and a decode server."""

    def __init__(self, server: str, prefill: str | None, draw: random.Random):
        """server, prefill: gRPC endpoints."""
        self._server = server
        self._prefill = prefill
        self._draw = draw

    def run(self, load: Load) -> Times:
        """Run the load once."""
        return asyncio.run(self._run(load))

    async def _run(self, load: Load) -> Times:
        times = Times()
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(AsyncClient(self._server))
            prefill = await stack.enter_async_context(AsyncClient(self._prefill)) if self._prefill else None
            end = time.monotonic() + load.seconds
            short = [asyncio.ensure_future(self._short_requests(server, load, end, times)) for _ in range(load.streams)]
            long = []
            async for _ in _ticks(load.interval, load.seconds):
                long.append(asyncio.ensure_future(self._long_request(server, prefill, load, times)))
            await asyncio.gather(*short, *long)
        return times

    async def _short_requests(self, server: AsyncClient, load: Load, end: float, times: Times) -> None:
        while time.monotonic() < end:
            stream = server.stream(self._prompt(load.prompt), max_tokens=load.output, temperature=0, ignore_eos=True)
            stamps = [time.monotonic() async for _ in stream]
            times.between += [later - earlier for earlier, later in itertools.pairwise(stamps)]

    async def _long_request(self, server: AsyncClient, prefill: AsyncClient | None, load: Load, times: Times) -> None:
        began, prompt = time.monotonic(), self._prompt(load.long)
        if prefill:
            await prefill.generate(prompt, prefill_only=True)
        answer = await server.generate(prompt, max_tokens=1, temperature=0)
        times.first.append(time.monotonic() - began)
        times.cached.append(int((answer.receipt or {})["cached_tokens"]))

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(length)]


async def _ticks(interval: float, seconds: float) -> AsyncIterator[None]:
    """Yield in the middle of each interval within the next seconds, at least once."""
    began = time.monotonic()
    for number in range(max(1, int(seconds / interval))):
        await asyncio.sleep(began + (number + 0.5) * interval - time.monotonic())
        yield


def measure(options: Mapping[str, object], model: str, store: str, load: Load, rounds: int) -> list[Record]:
    """Run both contestants alternately, and return their records. load: its interval is replaced by one that the
    prefill server can keep up with."""
    half = len(os.sched_getaffinity(0)) // 2
    cores = sorted(os.sched_getaffinity(0))[: 2 * half]
    shared = {**options, "remote_cache_url": store, "remote_cache_timeout_ms": TIMEOUT_MS, "tier_read_mode": "always"}
    with ExitStack() as stack:
        servers = []
        for used, own in ((cores, options), (cores[:half], shared), (cores[half:], shared)):
            with on_cores(used):
                servers.append(stack.enter_context(TritonServer(model, own, engine_only=True)))
        mixed, prefill, decode = servers
        draw = random.Random(0)
        contestants = {
            MIXED: Contestant(mixed.grpc_url, None, draw),
            PAIR: Contestant(decode.grpc_url, prefill.grpc_url, draw),
        }
        alone = Contestant(prefill.grpc_url, None, draw)
        single = replace(load, seconds=1e-3, streams=0, interval=1e-3)  # one long prompt
        alone.run(single)
        load = replace(load, interval=LOAD * alone.run(single).first[0])
        for warm_up in contestants.values():
            warm_up.run(replace(load, seconds=2 * load.interval))
        found: dict[str, list[Times]] = {name: [] for name in contestants}
        for number in range(rounds):
            names = list(contestants)
            for name in names if number % 2 == 0 else names[::-1]:
                for server in servers:
                    wait_until_populated(server)
                found[name].append(contestants[name].run(load))
    return records_of(found, load)


def records_of(found: Mapping[str, Sequence[Times]], load: Load) -> list[Record]:
    """Return the records of all rounds: medians over the rounds."""
    records = [Record(f"time between two prompts of {load.long:,} tokens", load.interval, "s")]
    figures = {
        (name, share): [1e3 * percentile(one.between, share) for one in rounds]
        for name, rounds in found.items()
        for share in (0.5, 0.99)
    }
    for (name, share), values in figures.items():
        what = f"time between tokens p{100 * share:.0f}, {name}"
        records.append(Record(what, statistics.median(values), "ms"))
    for share, target in ((0.5, None), (0.99, TARGET)):
        what = f"time between tokens p{100 * share:.0f}, {PAIR} / {MIXED}"
        records.append(ratio(what, figures[PAIR, share], figures[MIXED, share], target))
    for name, rounds in found.items():
        first = [1e3 * statistics.median(one.first) for one in rounds]
        records.append(Record(f"time to first token of long prompts, {name}", statistics.median(first), "ms"))
    for name, rounds in found.items():
        counts = [len(one.between) / load.seconds for one in rounds]
        records.append(Record(f"responses with further tokens, {name}", statistics.median(counts), "1/s"))
    cached = [tokens for one in found[PAIR] for tokens in one.cached]
    share = sum(cached) / (len(cached) * ((load.long - 1) // BLOCK_SIZE * BLOCK_SIZE))
    records.append(Record("share of the long prompts' blocks that the decode server has read", share, "x", limit=1.0))
    return records


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 1, "seconds": 8, "long": 512})
    records = Records(args)
    what = f"time between tokens p99, {PAIR} / {MIXED}"
    if find_redis() and len(os.sched_getaffinity(0)) > 1:
        load = Load(args.seconds, args.streams, args.prompt, args.output, args.long, 0.0)
        blocks = 4 * -(-args.long // BLOCK_SIZE) + args.streams * -(-(args.prompt + args.output) // BLOCK_SIZE)
        options = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": max(512, blocks),
            "swap_space": args.swap_space,
        }
        with tempfile.TemporaryDirectory() as directory:
            store = RedisServer(Path(directory))
            try:
                records += measure(options, resolve_model(args.model), store.url, load, args.rounds)
            finally:
                store.kill()
    else:
        records.append(not_measured(what, NEEDS))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("disaggregation", __doc__)
    made.add_argument("--model", default="demo", help="model to serve (default: demo)")
    made.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds (default: 5)")
    made.add_argument("--seconds", type=count, default=40, metavar="N", help="seconds of a run (default: 40)")
    made.add_argument("--streams", type=count, default=4, metavar="N", help="short requests at once (default: 4)")
    made.add_argument("--prompt", type=count, default=32, metavar="N", help="tokens of their prompts (default: 32)")
    made.add_argument("--output", type=count, default=128, metavar="N", help="tokens they generate (default: 128)")
    made.add_argument("--long", type=count, default=2048, metavar="N", help="tokens of a long prompt (default: 2048)")
    made.add_argument(
        "--swap-space", type=count, default=1, metavar="GIB", help="host pool of each server (default: 1)"
    )
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    figure, axes = _chart.panels(2, 4)
    for each, what, title in zip(
        axes,
        ("time between tokens", "time to first token of long prompts"),
        ("time between tokens of short requests, ms", "time to first token of long prompts, ms"),
        strict=True,
    ):
        shown = [one for one in records if one.name.startswith(what) and one.unit == "ms"]
        values = {one.name.removeprefix(what).lstrip(", "): one.value or 0.0 for one in shown}
        _chart.bars(each, values, title, grey=[name for name in values if PAIR not in name])
    _chart.save(figure, file, caption)
