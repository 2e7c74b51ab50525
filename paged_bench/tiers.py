"""Measure the time to first token with a prefix from memory, disk or a remote store, and what a failed store costs.

One engine computes prompts and writes their blocks to disk and to a Redis server of this machine. Engines that have not
seen the prompts then read them, each from one tier. The second part compares the duration of requests with a store that
was killed, or that accepts connections and never answers, with that of an engine without a tier.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.engine.outputs import EngineDied, EngineOutput, StepOutput
from paged_backend.scheduling.stats import SchedulerStats
from paged_bench._redis_server import RedisServer, find_redis
from paged_bench._report import Record, Records, alternate, arguments, count, not_measured, parser, publish, ratio
from paged_client.serving.repository import resolve_model

REMOTE_TARGET = 0.3  # time to first token, relative to computing the prompt
DISABLED_TARGET = 1.2  # duration of requests, relative to an engine without a tier
TIMEOUT_MS = 20_000  # of the store while reads are timed, so that other processes of the machine do not disable it
DISABLE_SECONDS = 30.0  # time limit of the remote tier, and ample time to notice it
NO_REDIS = "no redis-server"


class RunningEngine:
    """An engine that runs until the end of the benchmark."""

    def __init__(self, assembly: Assembly):
        """Start the engine."""
        self.assembly = assembly
        self._outputs: SimpleQueue[EngineOutput] = SimpleQueue()
        self._keys = itertools.count()
        self.engine = assembly.engine(self._outputs.put)
        self.engine.start()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Return how many seconds it takes to answer prompts that are sent at once."""
        sampling, limits = SamplingParams(max_tokens=max_tokens, temperature=0), self.assembly.limits
        unfinished = {next(self._keys): list(prompt) for prompt in prompts}
        began = time.perf_counter()
        for key, prompt in unfinished.items():
            self.engine.submit(GenerateRequest.from_prompt(key, prompt, sampling, 0, frozenset(), limits))
        while unfinished:
            for delta in self._next().deltas:
                if delta.error:
                    raise RuntimeError(str(delta.error))
                if delta.last:
                    del unfinished[delta.key]
        return time.perf_counter() - began

    def wait_for(self, condition: Callable[[SchedulerStats], bool]) -> None:
        """Wait until a condition of the statistics holds after a step."""
        while not condition(self._next().stats):
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
    def stats(self) -> SchedulerStats:
        """The current statistics of the tiers."""
        assert self.assembly.tiers
        return self.assembly.tiers.add_stats(self.assembly.scheduler.stats)

    def _next(self) -> StepOutput:
        output = self._outputs.get()
        if isinstance(output, EngineDied):
            raise RuntimeError(output.reason)
        assert isinstance(output, StepOutput)
        return output


@contextmanager
def running(options: Mapping[str, object]) -> Iterator[RunningEngine]:
    """Run an engine with these options until the end of the block."""
    assembly = assemble(EngineConfig.from_options(options))
    made = RunningEngine(assembly)
    try:
        yield made
    finally:
        made.engine.stop()
        assembly.close()


def _prompts(assembly: Assembly, length: int) -> Callable[[], list[int]]:
    """Return a function that returns a new random prompt of the assembly's model."""
    draw_token, vocab = random.Random(length).randrange, assembly.limits.vocab_size
    return lambda: [draw_token(vocab) for _ in range(length)]


def first_tokens(
    options: Mapping[str, object], directory: Path, store: RedisServer | None, tokens: int, rounds: int
) -> list[Record]:
    """Measure the time to first token of prompts that are computed, or read from each of the tiers."""
    disk = {"disk_cache_dir": str(directory / "kv"), "disk_cache_gib": 100}
    remote: dict[str, object] = {}
    if store:
        remote = {"remote_cache_url": store.url, "remote_cache_gib": 100, "remote_cache_timeout_ms": TIMEOUT_MS}
    needed = -(-tokens // 16) + 2
    options = {**options, "num_gpu_blocks_override": needed + needed // 8, "tier_read_mode": "always"}
    with ExitStack() as stack:
        writer = stack.enter_context(running({**options, **disk, **remote}))
        draw_prompt = _prompts(writer.assembly, tokens + 1)
        prompts, others = ([draw_prompt() for _ in range(rounds + 1)] for _ in range(2))
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
        order = {name: itertools.count() for name in engines}

        def contestant(name: str) -> Callable[[], float]:
            def once() -> float:
                number = next(order[name])
                if name == "host":  # the second prompt evicts the blocks of the first one to the host
                    engines[name].run([prompts[number]], 1)
                    engines[name].run([others[number]], 1)
                return 1e3 * engines[name].run([prompts[number]], 1)

            return once

        contestants = {name: contestant(name) for name in engines}
        for warm_up in contestants.values():
            warm_up()
        figures = alternate(contestants, rounds)
        for name, read in {"disk": "disk_read", "remote": "remote_read"}.items():
            if name in engines and getattr(engines[name].stats, read) != blocks:
                raise RuntimeError(f"not all blocks were read from the {name} tier; see the log")
        costs = {name: getattr(engines[name].stats, f"{name}_seconds") for name in engines.keys() & {"disk", "remote"}}
    what = f"time to first token, {tokens:,} tokens"
    records = [Record(f"{what}, {name}", statistics.median(values), "ms") for name, values in figures.items()]
    for name, target in {"host": None, "disk": None, "remote": REMOTE_TARGET}.items():
        if name in figures:
            records.append(ratio(f"{what}, {name} / computed", figures[name], figures["computed"], target))
    records += [Record(f"cost of a block, {name}", 1e3 * cost, "ms") for name, cost in sorted(costs.items())]
    return records if store else [*records, not_measured(f"{what}, remote", NO_REDIS)]


def failed_store(
    options: Mapping[str, object], directory: Path, requests: int, length: int, output: int, rounds: int
) -> list[Record]:
    """Measure the duration of requests while the store of the remote tier has failed."""
    names = {"killed": signal.SIGKILL, "not answering": signal.SIGSTOP}
    options = {**options, "swap_space": 1, "tier_read_mode": "always"}
    with ExitStack() as stack:
        engines = {"no tier": stack.enter_context(running(options))}
        for name, failure in names.items():
            (directory / name).mkdir()
            store = RedisServer(directory / name)
            stack.callback(store.kill)
            engine = stack.enter_context(running({**options, "remote_cache_url": store.url}))
            assert store.process
            store.process.send_signal(failure)
            engines[name] = engine
        draw_prompt = _prompts(engines["no tier"].assembly, length)

        def contestant(engine: RunningEngine) -> Callable[[], float]:
            return lambda: engine.run([draw_prompt() for _ in range(requests)], output)

        contestants = {name: contestant(engine) for name, engine in engines.items()}
        for warm_up in contestants.values():  # disables the tiers
            warm_up()
        for name in names:
            engines[name].wait_until_disabled()
        figures = alternate(contestants, rounds)
    return [
        ratio(f"duration of requests, store {name} / no tier", figures[name], figures["no tier"], DISABLED_TARGET)
        for name in names
    ]


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 1, "tokens": 1024, "requests": 4})
    options = {"model": resolve_model(args.model), "swap_space": args.swap_space}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory, store = Path(name), None
        if find_redis():
            store = RedisServer(directory)
            stack.callback(store.kill)
        records = Records(args, first_tokens(options, directory, store, args.tokens, args.rounds))
        if store:
            store.kill()
            options["num_gpu_blocks_override"] = 1024
            records += failed_store(options, directory, args.requests, args.length, args.output, args.rounds)
        else:
            records.append(not_measured("duration of requests", NO_REDIS))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("tiers", __doc__)
    made.add_argument("--model", default="demo", help="Hugging Face model directory (default: demo)")
    made.add_argument("--tokens", type=count, default=2048, metavar="N", help="tokens of the prefix (default: 2048)")
    made.add_argument("--rounds", type=count, default=5, metavar="N", help="rounds of each comparison (default: 5)")
    made.add_argument("--requests", type=count, default=8, metavar="N", help="requests at once (default: 8)")
    made.add_argument("--length", type=count, default=128, metavar="N", help="tokens of their prompts (default: 128)")
    made.add_argument("--output", type=count, default=16, metavar="N", help="tokens that they generate (default: 16)")
    made.add_argument(
        "--swap-space", type=count, default=2, metavar="GIB", help="host memory of each engine (default: 2)"
    )
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    first, failed = figure.subplots(1, 2)
    times = {one.name.rpartition(", ")[2]: one.value for one in records if one.unit == "ms" and "first" in one.name}
    bars = first.bar(list(times), list(times.values()), color=["#b0b0b0", *["#76b900"] * (len(times) - 1)])
    first.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    first.set_title("time to first token by origin of the prefix, ms", fontsize=9)
    ratios = {one.name.split("store ")[1].split(" /")[0]: one.value or 0.0 for one in records if ", store " in one.name}
    bars = failed.bar(list(ratios), list(ratios.values()), color="#76b900", width=0.5)
    failed.bar_label(bars, fmt="{:.2f}", fontsize=8)
    failed.axhline(1, color="#b0b0b0", linewidth=1)
    failed.set_title("duration of requests with a failed store, relative to no tier", fontsize=9)
    for axes in (first, failed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, -0.08, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
