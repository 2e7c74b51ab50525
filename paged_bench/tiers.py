"""Measure the time to first token with a prefix from memory, disk or a remote store, and what a failed store costs.

One engine computes prompts and writes their blocks to disk and to a Redis server of this machine. Engines that have not
seen the prompts then read them, each from one tier. The second part measures the duration of requests with a store that
was killed, or that accepts connections and never answers, relative to an engine without a tier.
"""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from paged_backend.engine.assembly import Assembly
from paged_backend.scheduling.stats import Stats
from paged_bench._engine import RunningEngine, greedy, load
from paged_bench._harness import (
    Bars,
    Benchmark,
    Option,
    Record,
    alternate,
    figures,
    model_option,
    not_measured,
    rounds_option,
)
from paged_bench._servers import RedisServer, find_redis
from paged_client.serving.repository import resolve_model

REMOTE_TARGET = 0.3  # time to first token, relative to computing the prompt
DISABLED_TARGET = 1.2  # duration of requests, relative to an engine without a tier
TIMEOUT_MS = 20_000  # time limit of the store in timed reads, long enough that other processes do not disable it
DISABLE_SECONDS = 30.0  # time limit of the remote tier, and ample time to notice it
NO_REDIS = "no redis-server"


class TieredEngine(RunningEngine):
    """An engine that runs until the end of the benchmark."""

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return how many seconds it takes to answer prompts that are sent at once."""
        began = time.perf_counter()
        for _ in self.steps(greedy(self.assembly, prompts, max_tokens)):
            pass
        return time.perf_counter() - began

    def wait_for(self, condition: Callable[[Stats], bool]) -> None:
        """Wait until a condition of the statistics holds after a step."""
        while not condition(self.next_step().stats):
            pass

    def wait_until_disabled(self) -> None:
        """Wait until the remote tier is disabled, which takes as long as its time limit. Raises RuntimeError
        if it is not."""
        deadline = time.monotonic() + DISABLE_SECONDS
        while self.stats.remote_up:
            if time.monotonic() > deadline:
                raise RuntimeError("the remote tier is in use, although its store has failed")
            time.sleep(0.01)

    @property
    def stats(self) -> Stats:
        """The current statistics of the tiers."""
        assert self.assembly.stores
        return Stats(**self.assembly.stores.stats)


@contextmanager
def running(options: Mapping[str, object]) -> Iterator[TieredEngine]:
    """Run an engine with these options until the end of the block."""
    engine = TieredEngine(load(options))
    try:
        yield engine
    finally:
        engine.stop()
        engine.assembly.close()


def _prompts(assembly: Assembly, length: int) -> Iterator[list[int]]:
    """Yield random prompts of the assembly's model."""
    draw_token, vocab = random.Random(length).randrange, assembly.limits.vocab_size
    while True:
        yield [draw_token(vocab) for _ in range(length)]


def first_tokens(
    options: Mapping[str, object], directory: Path, store: RedisServer | None, tokens: int, rounds: int
) -> Iterator[Record]:
    """Measure the time to first token of prompts that are computed, or read from each of the tiers."""
    disk = {"disk_cache_dir": str(directory / "kv"), "disk_cache_gib": 100}
    remote: dict[str, object] = {}
    if store:
        remote = {"remote_cache_url": store.url, "remote_cache_gib": 100, "remote_cache_timeout_ms": TIMEOUT_MS}
    needed = -(-tokens // 16) + 2
    options = {**options, "num_gpu_blocks_override": needed + needed // 8, "tier_read_mode": "always"}
    with ExitStack() as stack:
        writer = stack.enter_context(running({**options, **disk, **remote}))
        drawn = _prompts(writer.assembly, tokens + 1)
        prompts, others = ([next(drawn) for _ in range(rounds + 1)] for _ in range(2))  # one for the warm-up
        for prompt in prompts:
            writer.run([prompt], 1)
        blocks = tokens // 16 * len(prompts)
        writer.wait_for(lambda stats: stats.disk_written >= blocks and (not store or stats.remote_written >= blocks))
        engines = {
            "computed": stack.enter_context(running({**options, "swap_space": 0})),
            "host": stack.enter_context(running(options)),
            "disk": stack.enter_context(running({**options, **disk})),
        }
        if store:
            engines["remote"] = stack.enter_context(running({**options, **remote}))

        def contestant(name: str, numbers: Iterator[int]) -> float:
            number, engine = next(numbers), engines[name]
            if name == "host":  # the second prompt evicts the blocks of the first one to the host
                engine.run([prompts[number]], 1)
                engine.run([others[number]], 1)
            return 1e3 * engine.run([prompts[number]], 1)

        contestants = {name: partial(contestant, name, itertools.count()) for name in engines}
        contest = alternate(contestants, rounds, warm_up=True)
        stats = {name: engines[name].stats for name in ("disk", "remote") if name in engines}
        for name, tier_stats in stats.items():
            if getattr(tier_stats, f"{name}_read") != blocks:
                raise RuntimeError(f"not all blocks were read from the {name} tier; see the log")
    what = f"time to first token, {tokens:,} tokens"
    yield from contest.records(f"{what}, {{}}", "ms")
    for tier in [name for name in engines if name != "computed"]:
        target = REMOTE_TARGET if tier == "remote" else None
        yield contest.ratio(f"{what}, {tier} / computed", tier, "computed", target)
    for name, tier_stats in stats.items():
        yield Record(f"cost of a block, {name}", 1e3 * getattr(tier_stats, f"{name}_seconds"), "ms")
    if not store:
        yield not_measured(f"{what}, remote", NO_REDIS)


def failed_store(options: Mapping[str, object], directory: Path, args: Namespace) -> Iterator[Record]:
    """Measure the duration of requests while the store of the remote tier has failed."""
    failures = {"killed": signal.SIGKILL, "not answering": signal.SIGSTOP}
    options = {**options, "swap_space": 1, "tier_read_mode": "always", "num_gpu_blocks_override": 1024}
    with ExitStack() as stack:
        engines = {"no tier": stack.enter_context(running(options))}
        for name, failure in failures.items():
            (directory / name).mkdir()
            store = RedisServer(directory / name)
            stack.callback(store.kill)
            engines[name] = stack.enter_context(running({**options, "remote_cache_url": store.url}))
            assert store.process
            store.process.send_signal(failure)
        drawn = _prompts(engines["no tier"].assembly, args.length)

        def contestant(engine: TieredEngine) -> float:
            return engine.run(list(itertools.islice(drawn, args.requests)), args.output)

        contestants = {name: partial(contestant, engine) for name, engine in engines.items()}
        for warm_up in contestants.values():  # disables the tiers
            warm_up()
        for name in failures:
            engines[name].wait_until_disabled()
        contest = alternate(contestants, args.rounds)
    for name in failures:
        yield contest.ratio(f"duration of requests, store {name} / no tier", name, "no tier", DISABLED_TARGET)


def measure(args: Namespace) -> Iterator[Record]:
    options = {"model": resolve_model(args.model), "swap_space": args.swap_space}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory, store = Path(scratch), None
        if find_redis():
            store = RedisServer(directory)
            stack.callback(store.kill)
        yield from first_tokens(options, directory, store, args.tokens, args.rounds)
        if store:
            store.kill()
            yield from failed_store(options, directory, args)
        else:
            yield not_measured("duration of requests", NO_REDIS)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    times = figures(records, "time to first token, .* tokens, ([a-z]+)")
    yield Bars("time to first token by origin of the prefix, ms", times, grey=["computed"])
    failed = figures(records, "duration of requests, store (.*) / no tier")
    yield Bars("duration of requests with a failed store, relative to no tier", failed, line=1.0)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--tokens", "tokens of the prefix", 2048),
        rounds_option(5),
        Option("--requests", "requests at once", 8),
        Option("--length", "tokens of their prompts", 128),
        Option("--output", "tokens that they generate", 16),
        Option("--swap-space", "host memory of each engine", 2, metavar="GIB"),
    ),
    quick={"rounds": 1, "tokens": 1024, "requests": 4},
)
