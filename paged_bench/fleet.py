"""Simulate a fleet of replicas under conversations, and compare policies that route the requests to them.

Every replica has a real scheduler and block manager but no model: a step takes the time that a linear model fitted to
measurements of Qwen3-0.6B on an H100 gives (_fleet_simulation.py, which also says what is simplified). The policies
`hashing` and `cache-aware` are the gateway's router without and with knowledge of the caches; like the gateway, the
latter uses it from the second turn on. `_fleet_workload.py` has the conversations.

The limit of the hit rate is that of one replica with the blocks of all, which runs each request in no time.

A run of a million conversations would take 0.9 to 1.8 hours per policy on one core (measured: 150 to 310 conversations
per second with 4 to 64 replicas). Short runs of large fleets mostly show cold caches. Memory grows with the blocks of
all replicas, by about 1 kB for each, and not with the number of conversations.
"""

from __future__ import annotations

import itertools
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from paged_bench._fleet_routing import POLICIES
from paged_bench._fleet_simulation import BLOCK_SIZE, H100_QWEN3, NO_COSTS, Fleet, Outcome
from paged_bench._fleet_workload import MAX_CONTEXT, Workload, mean_lengths, num_prompts
from paged_bench._report import Record, Records, arguments, count, parser, percentile, publish, rate

HARDWARE = "step costs of Qwen3-0.6B on an NVIDIA H100"
SIZES, MAX_REPLICAS = (4, 16, 64), 256
MIN_CONVERSATIONS = 20  # for figures after the warm-up
MIN_BLOCKS = MAX_CONTEXT // BLOCK_SIZE
MAX_LOAD = 2.0
ROUTED = ("hashing", "cache-aware")  # policies that should keep a conversation at one replica
HIT_RATE_TARGET = 0.95  # of the limit
IMBALANCE_TARGET = 1.3
PROGRESS_SECONDS = 5.0
FIGURES = {"hit rate": "%", "load imbalance": "x", "time to first token p50": "ms", "time to first token p99": "ms"}


def run(
    num_replicas: int, policies: Sequence[str], *, conversations: int, blocks: int, load: float, seed: int
) -> list[Record]:
    """Simulate one fleet with each policy, and return its figures."""
    prompts = num_prompts(num_replicas)
    mean = mean_lengths(prompts, seed)
    arrivals = load * num_replicas * H100_QWEN3.capacity(mean, blocks) / mean.turns  # conversations per second
    workload = Workload(prompts, arrivals, seed)
    records = []
    # The policy does not matter for one replica.
    pooled = Fleet(1, "round-robin", num_replicas * blocks, NO_COSTS)
    progress = _progress(f"one replica with the blocks of {num_replicas}", conversations)
    limit = 100 * pooled.run(iter(workload), conversations, progress).hit_rate
    for policy in policies:
        fleet = Fleet(num_replicas, policy, blocks, H100_QWEN3)
        progress = _progress(f"{num_replicas} replicas, {policy}", conversations)
        records += _records(num_replicas, policy, fleet.run(iter(workload), conversations, progress), limit)
    return records


def _records(num_replicas: int, policy: str, outcome: Outcome, limit: float) -> list[Record]:
    is_routed = policy in ROUTED
    values = {
        "hit rate": 100 * outcome.hit_rate,
        "load imbalance": outcome.imbalance,
        "time to first token p50": 1e3 * percentile(outcome.first_tokens, 0.5),
        "time to first token p99": 1e3 * percentile(outcome.first_tokens, 0.99),
    }
    targets = {"hit rate": HIT_RATE_TARGET * limit, "load imbalance": IMBALANCE_TARGET} if is_routed else {}
    limits = {"hit rate": limit, "load imbalance": 1.0}
    return [
        Record(_name(figure, num_replicas, policy), value, FIGURES[figure], targets.get(figure), limits.get(figure))
        for figure, value in values.items()
    ]


def _name(figure: str, num_replicas: int, policy: str) -> str:
    return f"{figure}, {num_replicas} replicas, {policy}"


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


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"conversations": 700})
    replicas = sorted(set(args.replicas or SIZES[: 2 if args.quick else None]))
    policies = [name for name in POLICIES if name in (args.policy or POLICIES)]
    print(f"simulated: {args.conversations:,} conversations each, {args.blocks:,} blocks of {BLOCK_SIZE}; {HARDWARE}")
    records = Records(args)
    for number in replicas:
        records += run(
            number,
            policies,
            conversations=args.conversations,
            blocks=args.blocks,
            load=args.load,
            seed=args.seed,
        )
    caption = f"{args.conversations:,} conversations, {args.blocks:,} blocks, load {args.load:g}; {HARDWARE}. Run on: "
    publish(records, lambda file, machine: draw(records, replicas, policies, file, caption + machine))
    return 0


def _replicas(text: str) -> int:
    if (value := count(text)) > MAX_REPLICAS:
        raise ArgumentTypeError(f"{text!r}: must be at most {MAX_REPLICAS}")
    return value


def _conversations(text: str) -> int:
    if (value := count(text)) < MIN_CONVERSATIONS:
        raise ArgumentTypeError(f"{text!r}: must be at least {MIN_CONVERSATIONS}, as the first ones are not measured")
    return value


def _blocks(text: str) -> int:
    if (value := count(text)) < MIN_BLOCKS:
        raise ArgumentTypeError(f"{text!r}: must be at least {MIN_BLOCKS}, for a conversation of {MAX_CONTEXT} tokens")
    return value


def _load(text: str) -> float:
    if (value := rate(text)) > MAX_LOAD:
        raise ArgumentTypeError(f"{text!r}: must be at most {MAX_LOAD:g}, as requests would only wait")
    return value


def _parser() -> ArgumentParser:
    made = parser("fleet", __doc__)
    add = made.add_argument
    sizes = "fleet size; may be repeated (default: 4, 16 and 64)"
    add("--replicas", type=_replicas, action="append", metavar="N", help=sizes)
    add(
        "--conversations",
        type=_conversations,
        default=7500,
        metavar="N",
        help="conversations for each fleet and policy (default: 7500); a million would take 1 to 2 hours on one core",
    )
    add("--policy", choices=POLICIES, action="append", help="simulate only this one; may be repeated")
    add(
        "--blocks",
        type=_blocks,
        default=16384,
        metavar="N",
        help=f"blocks of {BLOCK_SIZE} tokens of each replica (default: 16384)",
    )
    add(
        "--load",
        type=_load,
        default=0.7,
        metavar="SHARE",
        help="requests per second, as a share of what replicas with full batches complete without a cache"
        " (default: 0.7)",
    )
    add("--seed", type=count, default=1, metavar="N", help="seed of the conversations (default: 1)")
    return made


def draw(records: Sequence[Record], replicas: Sequence[int], policies: Sequence[str], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    by_name = {record.name: record for record in records}
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    panels = dict(zip(("hit rate", "load imbalance", "time to first token p99"), figure.subplots(1, 3), strict=True))
    for (title, axes), policy in itertools.product(panels.items(), policies):
        shown = [by_name[_name(title, number, policy)] for number in replicas]
        axes.plot(replicas, [record.value or 0.0 for record in shown], marker="o", markersize=4, label=policy)
    limits = [by_name[_name("hit rate", number, policies[0])].limit or 0.0 for number in replicas]
    panels["hit rate"].plot(replicas, limits, ":", color="#606060", label="one replica with all blocks")
    for title, axes in panels.items():
        axes.set_xscale("log", base=2)
        axes.set_xticks(replicas, [str(number) for number in replicas])
        axes.set_xlabel("replicas")
        axes.set_title(f"{title}, {FIGURES[title]}", fontsize=10)
        axes.set_ylim(1 if title == "load imbalance" else 0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels["hit rate"].legend(frameon=False, fontsize=8)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
