"""Measure the routing of the OpenAI gateway over several servers: hit rate, balance, loss of a server, overhead.

All parts run real servers and a real gateway on this machine. Prompts are conversations with shared system prompts;
each turn repeats the text before it. By default the pools of all servers together hold 1.2 times what the conversations
need.

- Hit rate: the share of prompt tokens that were cached, beside one server with the pool of all.
- Balance: tokens computed by the busiest server, over the mean.
- Loss: one server is killed under load. Every request must succeed, and the hit rate returns to 0.95 of the one before.
- Overhead: throughput with routing, KV cache events, metrics and traces (1% of requests), over the throughput with none
  of them.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from paged_bench import _chart, _http_load
from paged_bench._byte_tokenizer import byte_tokenizer
from paged_bench._conversations import Shape, Turn, hit_rate, interleaved, recovery, steady
from paged_bench._gateways import computed_tokens, gateway, servers_of, trace_receiver
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish, rate, ratio
from paged_bench._workload import model_names, model_options
from paged_client.serving.repository import resolve_model

ROUTINGS = HASHING, EVENTS, ROUND_ROBIN = ("hashing", "kv-events", "round-robin")
ONE = "one server"
BLOCK_SIZE = 16
SLACK = 1.2  # what the pools hold, over what the conversations need
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TRACED_SHARE = 0.01
WINDOW = 2.0  # seconds over which the hit rate is computed after a loss
RECOVERED = 0.95


class Setup:
    """The model, and what its requests need."""

    def __init__(self, args: Namespace, scratch: Path) -> None:
        self.args = args
        self.shape = Shape(turns=args.turns)
        self.options = model_options(args.model) | {"block_size": BLOCK_SIZE, "max_num_seqs": 64}
        self.sampling: dict[str, Any] = {"temperature": 0}
        if "tokenizer" not in self.options:
            self.tokenizer = resolve_model(args.model)
            self._characters = 4  # per token
            return
        # Random weights: bytes as tokens, a plain template, and replies of letters, because other bytes are no text.
        made = byte_tokenizer(512)
        made.chat_template = TEMPLATE
        made.save_pretrained(scratch)
        self.tokenizer = str(scratch)
        self.options["tokenizer"] = self.tokenizer
        self.sampling["allowed_token_ids"] = made.encode(LETTERS)
        self._characters = 1

    @property
    def blocks(self) -> int:
        """Blocks of each server."""
        if self.args.blocks:
            return int(self.args.blocks)
        own = 5 * self.shape.words() / self._characters + self.shape.turns * (self.shape.reply_tokens + 20)
        shared = self.args.servers * self.shape.systems * 5 * self.shape.system_words / self._characters
        return int(SLACK * (self.args.conversations * own + shared) / self.args.servers / BLOCK_SIZE)

    def flags(self, routing: str, events: Sequence[str]) -> list[str]:
        """Return the gateway's flags."""
        own = ["--routing", "round-robin"] if routing == ROUND_ROBIN else []
        return ["--tokenizer", self.tokenizer, *own, *(events if routing == EVENTS else [])]


def conversations(setup: Setup, routing: str) -> tuple[float, float, list[Turn]]:
    """Return the hit rate, the imbalance and the turns of all conversations."""
    args, number = setup.args, 1 if routing == ONE else setup.args.servers
    options = setup.options | {"num_gpu_blocks_override": setup.blocks * (args.servers if routing == ONE else 1)}
    with (
        servers_of(number, options, events=routing == EVENTS) as (servers, events),
        gateway(servers, *setup.flags(routing, events)) as running,
    ):
        turns = interleaved(running.url, setup.shape, args.conversations, args.at_once, setup.sampling)
        loads = [computed_tokens(server) for server in servers]
    return hit_rate(turns), max(loads) / (sum(loads) / len(loads)), turns


def rates(setup: Setup) -> list[Record]:
    found, routings = {}, setup.args.routing or ROUTINGS[: 1 if setup.args.quick else None]
    for routing in (ONE, *routings):
        _progress(f"conversations: {routing}")
        found[routing] = conversations(setup, routing)
        _progress(f"  hit rate {found[routing][0]:.3f}, imbalance {found[routing][1]:.2f}")
    best, records = found[ONE][0], [Record(f"hit rate, {ONE} with the pool of all", 100 * found[ONE][0], "%")]
    for routing in routings:
        share, imbalance, turns = found[routing]
        failed = sum(bool(turn.error) for turn in turns)
        target = None if routing == ROUND_ROBIN else 0.95
        records += [
            Record(f"hit rate, {routing}", 100 * share, "%"),
            Record(f"hit rate over {ONE}, {routing}", share / best, "x", target, 1.0),
            Record(
                f"load of the busiest server over the mean, {routing}", imbalance, "x", 1.3 if target else None, 1.0
            ),
            Record(f"failed requests, {routing}", failed, "requests", 0),
        ]
    return records


def loss(setup: Setup, routing: str) -> list[Record]:
    """Kill a server under load."""
    args, options = setup.args, setup.options | {"num_gpu_blocks_override": setup.blocks}
    _progress(f"loss of a server: {routing}")
    with (
        servers_of(args.servers, options, events=routing == EVENTS) as (servers, events),
        gateway(servers, *setup.flags(routing, events)) as running,
    ):
        turns, event = steady(
            running.url, setup.shape, args.at_once, args.loss_seconds, setup.sampling, servers[0].kill
        )
    errors = [turn.error for turn in turns if turn.error]
    for error in sorted(set(errors)):
        _progress(f"  failed: {error}")
    seconds = recovery([turn for turn in turns if not turn.error], event, RECOVERED, WINDOW)
    peers = {
        "hit rate before": hit_rate([turn for turn in turns if turn.ended < event]),
        "hit rate after": hit_rate([turn for turn in turns if turn.ended >= event]),
    }
    name = f"until the hit rate recovers from the loss of a server, {routing}"
    return [
        Record(f"failed requests of {len(turns)} with the loss of a server, {routing}", len(errors), "requests", 0),
        Record(name, seconds, "s" if seconds is not None else "not recovered", 30.0, None, peers),
    ]


def overhead(setup: Setup) -> list[Record]:
    """Measure the throughput with and without what this benchmark is about."""
    args = setup.args
    options = setup.options | {"num_gpu_blocks_override": 4096, "enable_prefix_caching": True}
    message = {"role": "user", "content": "Once upon a time there was a"}
    body = {"model": "paged_llm", "stream": True, "max_tokens": args.tokens, "ignore_eos": True, **setup.sampling}

    def throughput(port: int, offset: list[int]) -> float:
        offset[0] += args.requests
        bodies = [
            {**body, "messages": [message | {"content": f"{offset[0] + index} {message['content']}"}]}
            for index in range(args.requests)
        ]
        times = _http_load.closed_loop(port, "/v1/chat/completions", bodies, args.at_once)
        seconds = max(one.stamps[-1] for one in times) - min(one.sent for one in times)
        return args.requests * args.tokens / seconds

    with ExitStack() as stack:
        enter = stack.enter_context
        traced = {"otlp_traces_endpoint": enter(trace_receiver()), "trace_sample_ratio": TRACED_SHARE}
        setups: dict[str, tuple[dict[str, Any], str]] = {
            "all": (traced, EVENTS),
            "all but traces": ({}, EVENTS),
            "none": ({"disable_log_stats": True}, ROUND_ROBIN),
        }
        contestants: dict[str, Callable[[], float]] = {}
        for name, (own, routing) in setups.items():
            servers, events = enter(servers_of(1, options | own, events=routing == EVENTS))
            running = enter(gateway(servers, *setup.flags(routing, events)))
            contestants[name] = partial(throughput, running.port, [0])
            contestants[name]()  # warm up
        figures = alternate(contestants, args.rounds)
    return [
        *(Record(f"throughput, {name}", sorted(each)[len(each) // 2], "tokens/s") for name, each in figures.items()),
        ratio("throughput with routing, events, metrics and traces", figures["all"], figures["none"], 0.98, 1.0),
        ratio(f"throughput with traces of {TRACED_SHARE:.0%}", figures["all"], figures["all but traces"], 0.99, 1.0),
    ]


PARTS = ("conversations", "loss", "overhead")


def main(argv: Sequence[str]) -> int:
    quick = {"servers": 2, "conversations": 8, "turns": 2, "loss_seconds": 4.0, "requests": 8, "tokens": 8, "rounds": 1}
    args = arguments(_parser(), argv, quick)
    records = Records(args)
    with tempfile.TemporaryDirectory() as scratch:
        setup = Setup(args, Path(scratch))
        for part in args.part or PARTS[: 1 if args.quick else None]:
            if part == "conversations":
                records += rates(setup)
            elif part == "loss":
                routings = args.routing or (HASHING, EVENTS)
                records += [one for routing in routings for one in loss(setup, routing)]
            else:
                records += overhead(setup)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("routing", __doc__)
    add = made.add_argument
    shapes = ", ".join(model_names())
    add(
        "--model", default="tiny", help=f"model directory, 'demo', or one with random weights: {shapes} (default: tiny)"
    )
    add("--servers", type=count, default=4, metavar="N", help="number of servers (default: 4)")
    add("--conversations", type=count, default=200, metavar="N", help="number of conversations (default: 200)")
    add("--turns", type=count, default=6, metavar="N", help="turns of a conversation (default: 6)")
    add("--at-once", type=count, default=16, metavar="N", help="number of open requests (default: 16)")
    add("--blocks", type=count, metavar="N", help="blocks of 16 tokens of each server (default: 1.2 times the need)")
    add("--loss-seconds", type=rate, default=45.0, metavar="S", help="seconds before and after a loss (default: 45)")
    add("--requests", type=count, default=64, metavar="N", help="requests of a round of the overhead (default: 64)")
    add("--tokens", type=count, default=64, metavar="N", help="output tokens of these requests (default: 64)")
    add("--rounds", type=count, default=9, metavar="N", help="rounds of the overhead (default: 9)")
    add("--routing", choices=ROUTINGS, action="append", help="measure only this one; may be repeated")
    add("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    titles = {
        "hit rate, ": "hit rate, %",
        "load of the busiest server over the mean, ": "load of the busiest server over the mean",
        "throughput, ": "throughput, tokens/s",
    }
    found = {
        prefix: {
            one.name.removeprefix(prefix): one.value
            for one in records
            if one.name.startswith(prefix) and one.value is not None
        }
        for prefix in titles
    }
    shown = {prefix: values for prefix, values in found.items() if values}
    figure, axes = _chart.panels(max(1, len(shown)), 4)
    for each, (prefix, values) in zip(axes, shown.items(), strict=False):
        _chart.bars(each, values, titles[prefix])
    _chart.save(figure, file, caption)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
