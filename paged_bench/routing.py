"""Measure Dynamo's routing over several servers: hit rate, balance, loss of a server, overhead.

All parts run real servers on this machine, behind Dynamo's frontend with a worker for each server: `kv` routes by KV
cache events and load, `sessions` chooses servers in turn and keeps a conversation at its server by the session in a
header, `round-robin` only chooses them in turn. Prompts are conversations with shared system prompts; each turn repeats
the text before it. By default the pools of all servers together hold 1.2 times what the conversations need.

- Hit rate: the share of prompt tokens that were cached, beside one server with the pool of all.
- Balance: tokens computed by the busiest server, over the mean.
- Loss: one server is killed under load. Requests without an answer are counted, and streams that end before their last
  token, and the time until the hit rate returns to 0.95 of its earlier value.
- Overhead: throughput with KV cache events, routing by them, metrics and traces (1% of requests), over the throughput
  with none of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paged_bench._engine import WORDS, byte_tokenizer, model_options, shape_option
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, count, figures, rounds_option
from paged_bench._servers import (
    LoadResult,
    RunningGateway,
    computed_tokens,
    dynamo,
    http_closed_loop,
    moved_streams,
    servers_of,
    trace_receiver,
)
from paged_client.dynamo.processes import router_flags
from paged_client.serving.tritonserver import TritonServer

ROUTINGS = KV, SESSIONS, ROUND_ROBIN = ("kv", "sessions", "round-robin")
ONE = "one server"
BLOCK_SIZE = 16
SLACK = 1.2  # what the pools hold, over what the conversations need
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TRACED_SHARE = 0.01
WINDOW = 2.0  # seconds over which the hit rate is computed after a loss
RECOVERED = 0.95
TIMEOUT = 120  # seconds for a turn
SAMPLING = {"temperature": 0, "ignore_eos": True}
RECOVERY = "until the hit rate recovers from the loss of a server"
PARTS = ["conversations", "loss", "overhead"]
# Options of Dynamo's frontend: those of `paged dynamo`, and the block size of the servers. Dynamo recommends to set it.
FLAGS = {
    KV: (*router_flags("kv"), "--kv-cache-block-size", str(BLOCK_SIZE)),
    SESSIONS: (*router_flags("round-robin"), "--router-session-affinity-ttl-secs", "600"),
    ROUND_ROBIN: router_flags("round-robin"),
}


@dataclass(frozen=True)
class Shape:
    """The lengths of conversations."""

    systems: int = 8  # system prompts, shared by the conversations
    turns: int = 6
    system_words: int = 96
    user_words: int = 16
    reply_tokens: int = 16

    def words(self) -> int:
        """Return the words of a whole conversation without its system prompt and replies."""
        return self.turns * self.user_words


@dataclass(frozen=True)
class Turn:
    """A finished turn, or a failed one."""

    ended: float  # time.monotonic()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    cut: bool = False  # whether it failed after the first token


class Conversation:
    """The messages of a conversation so far."""

    def __init__(self, shape: Shape, number: int) -> None:
        self._shape = shape
        self._headers = {"X-Dynamo-Session-ID": str(number)}  # which only SESSIONS reads
        self._random = random.Random(number)
        system = _words(random.Random(-1 - number % shape.systems), shape.system_words)
        self._messages = [{"role": "system", "content": system}]

    async def turn(self, session: Any, url: str) -> Turn:
        """Stream the next reply. session: an aiohttp.ClientSession."""
        import aiohttp

        message = {"role": "user", "content": _words(self._random, self._shape.user_words)}
        body = {"model": "paged_llm", "messages": [*self._messages, message], **SAMPLING, "stream": True}
        body |= {"max_tokens": self._shape.reply_tokens, "stream_options": {"include_usage": True}}
        reply, error = _Reply(), ""
        try:
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=self._headers) as response:
                if response.status != 200:
                    return Turn(time.monotonic(), error=f"{response.status}: {await response.text()}")
                async for line in response.content:
                    reply.add(line)
        except (aiohttp.ClientError, asyncio.TimeoutError) as failure:
            error = repr(failure)
        if error := error or reply.error or reply.missing(self._shape.reply_tokens):
            return Turn(time.monotonic(), error=error, cut=bool(reply.text))
        self._messages += [message, {"role": "assistant", "content": reply.text}]
        cached = (reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(time.monotonic(), reply.usage["prompt_tokens"], cached)


class _Reply:
    """What the events of a stream have said so far."""

    def __init__(self) -> None:
        self.text, self.finish_reason, self.error = "", "", ""
        self.usage: dict[str, Any] = {}

    def add(self, line: bytes) -> None:
        """Add a line of the stream."""
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line.removeprefix(b"data: "))
        self.error = self.error or str(event.get("error") or "")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def missing(self, tokens: int) -> str:
        """Return what an answer of so many tokens lacks."""
        if self.finish_reason != "length":
            return f"ended with finish_reason={self.finish_reason}"
        generated = self.usage.get("completion_tokens")
        return "" if generated == tokens else f"completion_tokens={generated} instead of {tokens}"


def hit_rate(turns: Sequence[Turn]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.prompt_tokens for turn in turns))


def interleaved(url: str, shape: Shape, count: int, at_once: int) -> list[Turn]:
    """Run the first turns of all conversations, then all second turns, and so on, each time in another random order.

    Args:
        url: where the requests go.
        at_once: number of open requests.
    """

    async def run(session: Any) -> list[Turn]:
        conversations, slots, turns = [Conversation(shape, number) for number in range(count)], at_once, list[Turn]()

        async def work(waiting: Iterator[Conversation]) -> None:
            for conversation in waiting:
                turns.append(await conversation.turn(session, url))

        for number in range(shape.turns):
            waiting = iter(random.Random(number).sample(conversations, count))
            await asyncio.gather(*(work(waiting) for _ in range(slots)))
        return turns

    return _with_session(run)


def steady(
    url: str, shape: Shape, at_once: int, seconds: float, halfway: Callable[[], object]
) -> tuple[list[Turn], float]:
    """Run conversations one after the other, `at_once` at any time. Return the turns, and the time of `halfway`.

    Args:
        seconds: duration of each half; `halfway` is called between them.
    """

    async def run(session: Any) -> tuple[list[Turn], float]:
        turns, numbers, end = list[Turn](), itertools.count(), time.monotonic() + 2 * seconds

        async def work() -> None:
            while time.monotonic() < end:
                conversation = Conversation(shape, next(numbers))
                for _ in range(shape.turns):
                    turns.append(await conversation.turn(session, url))

        working = [asyncio.ensure_future(work()) for _ in range(at_once)]
        await asyncio.sleep(seconds)
        event = time.monotonic()
        await asyncio.to_thread(halfway)
        await asyncio.gather(*working)
        return turns, event

    return _with_session(run)


def recovery(turns: Sequence[Turn], event: float, share: float, window: float) -> float | None:
    """Return the seconds after `event` until all further windows have at least `share` of the hit rate before it.

    None if it does not recover.
    """
    before = hit_rate([turn for turn in turns if event - 10 * window <= turn.ended < event])
    after = [turn for turn in turns if turn.ended >= event]
    last = max((turn.ended for turn in after), default=event)
    recovered = 0.0
    for index in range(int((last - event) / window)):
        start = event + index * window
        part = [turn for turn in after if start <= turn.ended < start + window]
        if hit_rate(part) < share * before:
            recovered = (index + 1) * window
    return recovered if recovered < last - event - window else None


def _with_session(run: Callable[[Any], Any]) -> Any:
    import aiohttp

    async def work() -> Any:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await run(session)

    return asyncio.run(work())


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


class Setup:
    """The model, and what its requests need."""

    def __init__(self, args: Namespace, scratch: Path) -> None:
        self.args = args
        self.shape = Shape(turns=args.turns, reply_tokens=args.reply_tokens)
        self.options = model_options(args.model) | {"block_size": BLOCK_SIZE, "max_num_seqs": 64}
        if "tokenizer" not in self.options:
            self._characters = 4  # characters per token
            return
        # Random weights: bytes as tokens, and a plain template.
        made = byte_tokenizer(512)
        made.chat_template = TEMPLATE
        made.save_pretrained(scratch)
        self.options["tokenizer"] = str(scratch)
        self._characters = 1

    @property
    def blocks(self) -> int:
        """Blocks of each server."""
        if self.args.blocks:
            return int(self.args.blocks)
        own = 5 * self.shape.words() / self._characters + self.shape.turns * (self.shape.reply_tokens + 20)
        shared = self.args.servers * self.shape.systems * 5 * self.shape.system_words / self._characters
        return int(SLACK * (self.args.conversations * own + shared) / self.args.servers / BLOCK_SIZE)

    @contextmanager
    def routed(self, routing: str, number: int, **options: Any) -> Iterator[tuple[list[TritonServer], RunningGateway]]:
        """Start servers, and what routes requests to them. options: further engine options."""
        own = self.options | options
        with (
            servers_of(number, own, events=routing == KV) as servers,
            dynamo(servers, own, *FLAGS.get(routing, ())) as running,
        ):
            yield servers, running


def conversations(setup: Setup, routing: str) -> tuple[float, float, list[Turn]]:
    """Return the hit rate, the imbalance and the turns of all conversations."""
    args, number = setup.args, 1 if routing == ONE else setup.args.servers
    blocks = setup.blocks * (args.servers // number)
    with setup.routed(routing, number, num_gpu_blocks_override=blocks) as (servers, running):
        turns = interleaved(running.url, setup.shape, args.conversations, args.at_once)
        loads = [computed_tokens(server) for server in servers]
    for error in sorted({turn.error for turn in turns if turn.error}):
        _progress(f"  failed: {error}")
    return hit_rate(turns), max(loads) / (sum(loads) / len(loads)), turns


def rates(setup: Setup, routings: Sequence[str]) -> Iterator[Record]:
    """Compare hit rate and balance with one server that has the pool of all."""
    best = 0.0
    for routing in (ONE, *routings):
        _progress(f"conversations: {routing}")
        share, imbalance, turns = conversations(setup, routing)
        _progress(f"  hit rate {share:.3f}, imbalance {imbalance:.2f}")
        if routing == ONE:
            best = share
            yield Record(f"hit rate, {ONE} with the pool of all", 100 * share, "%")
            continue
        target, balance = (None, None) if routing == ROUND_ROBIN else (0.97, 1.3)
        yield Record(f"hit rate, {routing}", 100 * share, "%")
        yield Record(f"hit rate over {ONE}, {routing}", share / best, "x", target, 1.0)
        yield Record(f"load of the busiest server over the mean, {routing}", imbalance, "x", balance, 1.0)
        yield Record(f"failed requests, {routing}", sum(bool(turn.error) for turn in turns), "requests", 0)


def loss(setup: Setup, routing: str) -> Iterator[Record]:
    """Kill a server under load."""
    args = setup.args
    _progress(f"loss of a server: {routing}")
    with setup.routed(routing, args.servers, num_gpu_blocks_override=setup.blocks) as (servers, running):
        turns, event = steady(running.url, setup.shape, args.at_once, args.loss_seconds, servers[0].kill)
        moved = moved_streams(running)
    failed = [turn for turn in turns if turn.error]
    for error in sorted({turn.error for turn in failed}):
        _progress(f"  failed: {error}")
    seconds = recovery([turn for turn in turns if not turn.error], event, RECOVERED, WINDOW)
    peers = {
        "hit rate before": hit_rate([turn for turn in turns if turn.ended < event]),
        "hit rate after": hit_rate([turn for turn in turns if turn.ended >= event]),
    }
    cut = sum(turn.cut for turn in failed)
    lost = f"requests without an answer of {len(turns)} with the loss of a server, {routing}"
    yield Record(lost, len(failed) - cut, "requests", 0)
    yield Record(f"cut streams with the loss of a server, {routing}", cut, "streams", 0, None, {"moved": moved})
    unit = "s" if seconds is not None else "not measured: not recovered"
    yield Record(f"{RECOVERY}, {routing}", seconds, unit, 10.0, None, peers)


def overhead(setup: Setup) -> Iterator[Record]:
    """Measure the throughput with and without what this benchmark is about."""
    args, text = setup.args, "Once upon a time there was a"
    body = {"model": "paged_llm", "stream": True, "max_tokens": args.tokens, **SAMPLING}

    def run(port: int, numbers: Iterator[int]) -> LoadResult:
        contents = [f"{number} {text}" for number in itertools.islice(numbers, args.requests)]
        bodies = [{**body, "messages": [{"role": "user", "content": content}]} for content in contents]
        times = http_closed_loop(port, "/v1/chat/completions", bodies, args.at_once)
        return LoadResult.of(times, args.requests * args.tokens)

    with ExitStack() as stack:
        traced = {"otlp_traces_endpoint": stack.enter_context(trace_receiver()), "trace_sample_ratio": TRACED_SHARE}
        setups: Mapping[str, tuple[Mapping[str, Any], str]] = {
            "all": (traced, KV),
            "all but traces": ({}, KV),
            "none": ({"disable_log_stats": True}, ROUND_ROBIN),
        }
        contestants: dict[str, Callable[[], LoadResult]] = {}
        for name, (own, routing) in setups.items():
            _, running = stack.enter_context(setup.routed(routing, 1, num_gpu_blocks_override=4096, **own))
            contestants[name] = partial(run, running.port, itertools.count())
        contest = alternate(contestants, args.rounds, LoadResult.rate, warm_up=True)
    yield from contest.records("throughput, {}", "tokens/s")
    yield contest.ratio("throughput with routing, events, metrics and traces", "all", "none", 0.98, 1.0)
    yield contest.ratio(f"throughput with traces of {TRACED_SHARE:.0%}", "all", "all but traces", 0.99, 1.0)


def measure(args: Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(args, Path(scratch))
        for part in args.part:
            if part == "conversations":
                yield from rates(setup, args.routing or (ROUTINGS[:1] if args.quick else ROUTINGS))
            elif part == "loss":
                for routing in args.routing or [name for name in ROUTINGS if name != ROUND_ROBIN]:
                    yield from loss(setup, routing)
            else:
                yield from overhead(setup)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    balance = "load of the busiest server over the mean"
    for name, unit in (("hit rate", ", %"), (balance, ""), ("throughput", ", tokens/s"), (RECOVERY, ", s")):
        if shown := figures(records, f"{name}, (.*)"):
            yield Bars(f"{name}{unit}", shown)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        shape_option("tiny"),
        Option("--servers", "number of servers", 4),
        Option("--conversations", "number of conversations", 200),
        Option("--turns", "turns of a conversation", 6),
        Option("--reply-tokens", "output tokens of a turn", 16),
        Option("--at-once", "number of open requests", 16),
        Option("--blocks", "blocks of 16 tokens of each server (default: 1.2 times the need)", type=count),
        Option("--loss-seconds", "seconds before and after a loss", 45.0),
        Option("--requests", "requests of a round of the overhead", 64),
        Option("--tokens", "output tokens of these requests", 64),
        rounds_option(9),
        Option("--routing", "measure only this one", choices=ROUTINGS, many=True),
        Option("--part", "part to run", PARTS, choices=PARTS, many=True),
    ),
    quick={
        "servers": 2,
        "conversations": 8,
        "turns": 2,
        "loss_seconds": 4.0,
        "requests": 8,
        "tokens": 8,
        "rounds": 1,
        "part": PARTS[:1],
    },
)
