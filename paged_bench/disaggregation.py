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
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from paged_bench._harness import (
    Bars,
    Benchmark,
    Contest,
    Option,
    Record,
    alternate,
    figures,
    model_option,
    not_measured,
    percentile,
    ratio,
    rounds_option,
)
from paged_bench._servers import RedisServer, find_redis
from paged_client.async_client import AsyncClient
from paged_client.serving.repository import resolve_model
from paged_client.serving.tritonserver import TritonServer

TARGET = 0.5  # p99 of the time between tokens of the pair, relative to the mixed server
TIMEOUT_MS = 20_000  # time limit of the store, long enough that other processes do not disable it
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


def compare(options: Mapping[str, object], model: str, store: str, load: Load, rounds: int) -> Iterator[Record]:
    """Run both contestants alternately. The interval of `load` is replaced by an interval at which the prefill server
    can keep up."""
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

        contest = alternate(
            {name: partial(contestant.run, load) for name, contestant in contestants.items()},
            rounds,
            lambda times: 1e3 * percentile(times.between, 0.99),
            label="{}, p99 between tokens in ms",
        )
    yield from records_of(contest, load)


def records_of(contest: Contest[Times], load: Load) -> Iterator[Record]:
    """Yield medians over the rounds."""
    yield Record(f"time between two prompts of {load.long:,} tokens", load.interval, "s")
    between = {
        (name, share): [1e3 * percentile(times.between, share) for times in runs]
        for name, runs in contest.runs.items()
        for share in (0.5, 0.99)
    }
    for (name, share), values in between.items():
        yield Record(f"time between tokens p{100 * share:.0f}, {name}", statistics.median(values), "ms")
    for share, target in ((0.5, None), (0.99, TARGET)):
        what = f"time between tokens p{100 * share:.0f}, {PAIR} / {MIXED}"
        yield ratio(what, between[PAIR, share], between[MIXED, share], target)
    for name, runs in contest.runs.items():
        first = statistics.median(1e3 * statistics.median(times.first) for times in runs)
        yield Record(f"time to first token of long prompts, {name}", first, "ms")
    for name, runs in contest.runs.items():
        responses = statistics.median(len(times.between) / load.seconds for times in runs)
        yield Record(f"responses with further tokens, {name}", responses, "1/s")
    cached = [tokens for times in contest.runs[PAIR] for tokens in times.cached]
    share = sum(cached) / (len(cached) * ((load.long - 1) // BLOCK_SIZE * BLOCK_SIZE))
    yield Record("share of the long prompts' blocks that the decode server has read", share, "x", limit=1.0)


def measure(args: Namespace) -> Iterator[Record]:
    if not find_redis() or len(os.sched_getaffinity(0)) < 2:
        yield not_measured(f"time between tokens p99, {PAIR} / {MIXED}", NEEDS)
        return
    load = Load(args.seconds, args.streams, args.prompt, args.output, args.long, 0.0)
    blocks = 4 * -(-args.long // BLOCK_SIZE) + args.streams * -(-(args.prompt + args.output) // BLOCK_SIZE)
    options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": max(512, blocks), "swap_space": args.swap_space}
    with tempfile.TemporaryDirectory() as directory:
        store = RedisServer(Path(directory))
        try:
            yield from compare(options, resolve_model(args.model), store.url, load, args.rounds)
        finally:
            store.kill()


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    between = figures(records, f"time between tokens (p[0-9]+, (?:{MIXED}|{PAIR}))")
    grey = [name for name in between if MIXED in name]
    yield Bars("time between tokens of short requests, ms", between, grey)
    first = figures(records, "time to first token of long prompts, (.*)")
    yield Bars("time to first token of long prompts, ms", first, grey=[MIXED])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(help="model to serve"),
        rounds_option(5),
        Option("--seconds", "seconds of a run", 40),
        Option("--streams", "short requests at once", 4),
        Option("--prompt", "tokens of their prompts", 32),
        Option("--output", "tokens they generate", 128),
        Option("--long", "tokens of a long prompt", 2048),
        Option("--swap-space", "host pool of each server", 1, metavar="GIB"),
    ),
    quick={"rounds": 1, "seconds": 8, "long": 512},
)
