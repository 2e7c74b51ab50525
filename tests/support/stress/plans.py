"""The nemesis: by a seed, who asks what, and who leaves, when and how."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.support.stress.asks import Ask

PHASES = ("queued", "prefill", "decode", "last")
WAYS = {  # by face. A raw socket ends with FIN, or with RST and what was sent to it thrown away
    "http": ("fin", "rst", "deadline", "stop_request"),
    "grpc": ("deadline", "stop_request", "cancel", "close"),
}
LEAVES = ("fin", "rst", "cancel", "close")  # what a client does by itself; the other ways come from elsewhere
CANCELS = ("cancel", "close")  # of gRPC streams: see Storm
MAY = {"deadline": "timeout", "stop_request": "CANCELLED"}  # how a request may end beside well; else its client left
BAD = (  # refused by the engine, never by the server: see clients.GrpcWire
    {"max_tokens": 0},
    {"max_tokens": 99999999999},
    {"temperature": -1},
    {"temperature": float("nan")},
    {"n": 1000000},
    {"top_p": 2},
    {"stop_token_ids": [-1]},
    {"frobnicate": 1},
    {"logit_bias": {"5": 1000}},
)


@dataclass(frozen=True)
class Plan:
    """One request and its fate."""

    id: str
    face: str  # grpc or http
    ask: Ask
    may: tuple[str, ...] = ()  # how it may end, beside well
    way: str | None = None  # of the nemesis; None: it waits for its end
    phase: str | None = None  # at which it is meant to go
    delay: float = 0.0  # seconds until then, where that is before the first token
    after: int = 0  # tokens after which it goes, where it is later
    pause: float = 0.0  # seconds after its first tokens in which it does not read
    extra: dict[str, Any] | None = None  # more sampling parameters: a deadline, a salt, a priority

    @property
    def sampling(self) -> dict[str, Any]:
        return self.ask.sampling | (self.extra or {})


def to_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan)


def from_json(values: dict[str, Any]) -> Plan:
    return Plan(**values | {"ask": Ask(**values["ask"]), "may": tuple(values["may"])})


def plans(
    seed: int,
    asks: Sequence[Ask],
    *,
    kills: float,
    bad: float = 0.02,
    pauses: float = 0.02,
    cancels: bool = True,
    name: str = "r",
) -> Iterator[Plan]:
    """Without end. kills, bad, pauses: the share of requests that go early, are nonsense, or stop reading for a
    while. cancels: whether gRPC streams may be."""
    dice = random.Random(seed)
    number = 0
    while True:
        face, draw = dice.choice(("grpc", "http")), dice.random()
        plan = Plan(f"{name}{number}", face, dice.choice(asks), extra=_extra(dice, number))
        if draw < kills:
            ways = [way for way in WAYS[face] if cancels or way not in CANCELS]
            if "beam_width" in plan.ask.sampling:  # ended early it has other beams than it would have come to
                ways.remove("deadline")
            plan = _doomed(dice, plan, dice.choice(ways))
        elif draw < kills + bad:
            nonsense = Ask(plan.ask.text, dict(dice.choice(BAD)), [[]], [""], [])
            plan = replace(plan, ask=nonsense, may=("INVALID_ARGUMENT",), extra=None)
        elif draw < kills + bad + pauses:
            plan = replace(plan, pause=dice.uniform(0.05, 0.4))
        yield plan
        number += 1


def plan_killed_clients(seed: int, asks: Sequence[Ask], *, name: str, count: int, cancels: bool = True) -> list[Plan]:
    """Requests of a client that will be killed, wherever they are by then."""
    dice, faces = random.Random(seed), ("grpc", "http") if cancels else ("http",)
    return [
        Plan(
            f"{name}{number}", dice.choice(faces), dice.choice(asks), ("left",), "kill",
            extra=_extra(dice, number),
        )
        for number in range(count)
    ]  # fmt: skip


def _extra(dice: random.Random, number: int) -> dict[str, Any]:
    """A prompt under a salt of its own is computed anew, under one of few it is found in the cache."""
    salt = f"own{number}" if dice.random() < 0.5 else f"shared{dice.randrange(3)}"
    return {"cache_salt": salt, "priority": dice.choice((0, 0, 0, 1))}


def _doomed(dice: random.Random, plan: Plan, way: str) -> Plan:
    phase = dice.choice(PHASES)
    most = min(map(len, plan.ask.tokens))
    after = {"last": most - 1, "decode": dice.randint(1, max(1, most - 2))}.get(phase, 0)
    delay = {"queued": dice.uniform(0, 0.003), "prefill": dice.uniform(0.003, 0.05)}.get(phase, 0.0)
    doomed = replace(plan, way=way, phase=phase, may=(MAY.get(way, "left"),), delay=delay, after=max(0, after))
    if way != "deadline":
        return doomed
    # The server counts, so only the first phases can be aimed at.
    phase = dice.choice(("queued", "prefill", "decode"))
    limit = {"queued": (1, 3), "prefill": (3, 40), "decode": (20, 200)}[phase]
    extra = (plan.extra or {}) | {"timeout_ms": dice.randint(*limit)}
    return replace(doomed, phase=phase, delay=0.0, after=0, extra=extra)
