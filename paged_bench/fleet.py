"""Simulate a fleet of replicas under conversations, and compare policies that route the requests to them.

Every replica has a real scheduler and block manager but no model: a step takes the time that a linear model fitted to
measurements of Qwen3-0.6B on an H100 gives (_fleet_simulation.py, which also says what is simplified). The policies
`hashing` and `cache-aware` are consistent hashing with bounded loads without and with knowledge of the caches, which is
used from the second turn on.

The limit of the hit rate is the hit rate of one replica with the blocks of all, which runs each request in no time.

A run of a million conversations would take 0.9 to 1.8 hours per policy on one core (measured: 150 to 310 conversations
per second with 4 to 64 replicas). Short runs of large fleets mostly show cold caches. Memory grows with the blocks of
all replicas, by about 1 kB for each, and not with the number of conversations.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

from paged_bench._fleet_simulation import (
    BLOCK_SIZE,
    H100_QWEN3,
    MAX_CONTEXT,
    NO_COSTS,
    POLICIES,
    Fleet,
    Outcome,
    Workload,
    mean_lengths,
    num_prompts,
)
from paged_bench._harness import Benchmark, Lines, Option, Record, bounded, count, figures, percentile, rate

HARDWARE = "step costs of Qwen3-0.6B on an NVIDIA H100"
MIN_CONVERSATIONS = 20  # minimum for figures after the warm-up
MIN_BLOCKS = MAX_CONTEXT // BLOCK_SIZE
ROUTED = ("hashing", "cache-aware")  # policies that should keep a conversation at one replica
HIT_RATE_TARGET = 0.95  # share of the limit
IMBALANCE_TARGET = 1.3
PROGRESS_SECONDS = 5.0


def simulate(num_replicas: int, policies: Sequence[str], args: Namespace) -> Iterator[Record]:
    """Simulate one fleet with each policy."""
    prompts, conversations = num_prompts(num_replicas), args.conversations
    mean = mean_lengths(prompts, args.seed)
    arrivals = args.load * num_replicas * H100_QWEN3.capacity(mean, args.blocks) / mean.turns  # conversations a second
    workload = Workload(prompts, arrivals, args.seed)
    pooled = Fleet(1, POLICIES[0], num_replicas * args.blocks, NO_COSTS)  # with one replica, the policy does not matter
    progress = _progress(f"one replica with the blocks of {num_replicas}", conversations)
    limit = 100 * pooled.run(iter(workload), conversations, progress).hit_rate
    for policy in policies:
        fleet = Fleet(num_replicas, policy, args.blocks, H100_QWEN3)
        progress = _progress(f"{num_replicas} replicas, {policy}", conversations)
        outcome = fleet.run(iter(workload), conversations, progress)
        yield from _records(f"{num_replicas} replicas, {policy}", policy in ROUTED, outcome, limit)


def _records(what: str, is_routed: bool, outcome: Outcome, limit: float) -> Iterator[Record]:
    hit_rate, balance = (HIT_RATE_TARGET * limit, IMBALANCE_TARGET) if is_routed else (None, None)
    yield Record(f"hit rate, {what}", 100 * outcome.hit_rate, "%", hit_rate, limit)
    yield Record(f"load imbalance, {what}", outcome.imbalance, "x", balance, 1.0)
    for share in (0.5, 0.99):
        milliseconds = 1e3 * percentile(outcome.first_tokens, share)
        yield Record(f"time to first token p{100 * share:.0f}, {what}", milliseconds, "ms")


def _progress(name: str, conversations: int) -> Callable[[int], None]:
    """Return a function that prints the number of conversations that have started, every PROGRESS_SECONDS."""
    began = printed = time.monotonic()

    def progress(started: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= PROGRESS_SECONDS or started == conversations:
            printed = now
            speed = started / max(now - began, 1e-9)
            print(f"{name}: {started:,} of {conversations:,} conversations, {speed:,.0f} a second", file=sys.stderr)

    return progress


def measure(args: Namespace) -> Iterator[Record]:
    policies = [name for name in POLICIES if name in (args.policy or POLICIES)]
    print(f"simulated: {args.conversations:,} conversations each, {args.blocks:,} blocks of {BLOCK_SIZE}; {HARDWARE}")
    for number in sorted(set(args.replicas)):
        yield from simulate(number, policies, args)


def panels(records: Sequence[Record]) -> Iterator[Lines]:
    limits = {record.name.split(", ")[1]: record.limit for record in records if record.name.startswith("hit rate")}
    for name, unit in (("hit rate", "%"), ("load imbalance", "x"), ("time to first token p99", "ms")):
        lines: dict[str, dict[float, float]] = {
            policy: {float(n): value for n, value in figures(records, f"{name}, (.*) replicas, {policy}").items()}
            for policy in POLICIES
        }
        pooled = "one replica with all blocks"
        if name == "hit rate":
            lines[pooled] = {float(replicas.split()[0]): limit or 0.0 for replicas, limit in limits.items()}
        shown = {policy: line for policy, line in lines.items() if line}
        yield Lines(f"{name}, {unit}", shown, "replicas", dotted=[pooled])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        Option("--replicas", "fleet size", [4, 16, 64], many=True, type=bounded(count, most=256)),
        Option(
            "--conversations",
            "conversations for each fleet and policy; a million would take 1 to 2 hours on one core",
            7500,
            type=bounded(count, MIN_CONVERSATIONS, why="as the first ones are not measured"),
        ),
        Option("--policy", "simulate only this one", choices=POLICIES, many=True),
        Option(
            "--blocks",
            f"blocks of {BLOCK_SIZE} tokens of each replica",
            16384,
            type=bounded(count, MIN_BLOCKS, why=f"for a conversation of {MAX_CONTEXT} tokens"),
        ),
        Option(
            "--load",
            "requests per second, as a share of what replicas with full batches complete without a cache",
            0.7,
            type=bounded(rate, most=2.0, why="as requests would only wait"),
            metavar="SHARE",
        ),
        Option("--seed", "seed of the conversations", 1),
    ),
    quick={"replicas": [4, 16], "conversations": 700},
)
