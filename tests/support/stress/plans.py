"""The fault injector: by a seed, which client sends which request, and how and when it is disturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.support.stress.requests import StressRequest

PHASES = ("queued", "prefill", "decode", "last")
FAULTS = {  # faults by protocol. A raw socket is closed with FIN, or with RST, which discards unread data
    "http": ("fin", "rst", "deadline", "stop_request"),
    "grpc": ("deadline", "stop_request", "cancel", "close"),
}
DISCONNECTS = ("fin", "rst", "cancel", "close")  # faults by which the client itself disconnects
CANCELS = ("cancel", "close")  # faults that cancel gRPC streams: see StressTest
ALLOWED_END = {"deadline": "timeout", "stop_request": "CANCELLED"}  # end by fault; "left" for the others
INVALID = (  # rejected by the engine, not by the server: see clients.GrpcWire
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
    """A request, and the fault that is injected into it."""

    id: str
    protocol: str  # grpc or http
    request: StressRequest
    allowed_ends: tuple[str, ...] = ()  # how it may end, other than complete
    fault: str | None = None  # None: the client waits for the end
    phase: str | None = None  # approximate phase of the fault
    delay: float = 0.0  # seconds until the fault, for phases before the first token
    after: int = 0  # tokens until the fault, for later phases
    pause: float = 0.0  # seconds for which the client stops reading after the first tokens
    extra: dict[str, Any] | None = None  # more sampling parameters: a deadline, a salt, a priority

    @property
    def sampling(self) -> dict[str, Any]:
        return self.request.sampling | (self.extra or {})


def to_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan)


def from_json(values: dict[str, Any]) -> Plan:
    request = StressRequest(**values["request"])
    return Plan(**values | {"request": request, "allowed_ends": tuple(values["allowed_ends"])})


def plans(
    seed: int,
    requests: Sequence[StressRequest],
    *,
    faulty: float,
    invalid: float = 0.02,
    pauses: float = 0.02,
    cancels: bool = True,
    name: str = "r",
) -> Iterator[Plan]:
    """Yield plans endlessly.

    Args:
        faulty, invalid, pauses: shares of requests that end early, are invalid, or whose client stops reading for a
            while.
        cancels: whether gRPC streams may be cancelled.
    """
    rng = random.Random(seed)
    number = 0
    while True:
        protocol, draw = rng.choice(("grpc", "http")), rng.random()
        plan = Plan(f"{name}{number}", protocol, rng.choice(requests), extra=_extra(rng, number))
        if draw < faulty:
            faults = [fault for fault in FAULTS[protocol] if cancels or fault not in CANCELS]
            if "beam_width" in plan.request.sampling:  # the best beams may differ before the end
                faults.remove("deadline")
            plan = _with_fault(rng, plan, rng.choice(faults))
        elif draw < faulty + invalid:
            invalid_request = StressRequest(plan.request.text, dict(rng.choice(INVALID)), [[]], [""], [])
            plan = replace(plan, request=invalid_request, allowed_ends=("INVALID_ARGUMENT",), extra=None)
        elif draw < faulty + invalid + pauses:
            plan = replace(plan, pause=rng.uniform(0.05, 0.4))
        yield plan
        number += 1


def plan_killed_clients(
    seed: int, requests: Sequence[StressRequest], *, name: str, count: int, cancels: bool = True
) -> list[Plan]:
    """Return the plans of a client process that will be killed, at any time of its requests."""
    rng, protocols = random.Random(seed), ("grpc", "http") if cancels else ("http",)
    return [
        Plan(
            f"{name}{number}", rng.choice(protocols), rng.choice(requests), ("left",), "kill",
            extra=_extra(rng, number),
        )
        for number in range(count)
    ]  # fmt: skip


def _extra(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a cache salt and a priority. A prompt with a unique salt is never cached, one of a few salts may be."""
    salt = f"own{number}" if rng.random() < 0.5 else f"shared{rng.randrange(3)}"
    return {"cache_salt": salt, "priority": rng.choice((0, 0, 0, 1))}


def _with_fault(rng: random.Random, plan: Plan, fault: str) -> Plan:
    phase = rng.choice(PHASES)
    most = min(map(len, plan.request.tokens))
    after = {"last": most - 1, "decode": rng.randint(1, max(1, most - 2))}.get(phase, 0)
    delay = {"queued": rng.uniform(0, 0.003), "prefill": rng.uniform(0.003, 0.05)}.get(phase, 0.0)
    ends = (ALLOWED_END.get(fault, "left"),)
    planned = replace(plan, fault=fault, phase=phase, allowed_ends=ends, delay=delay, after=max(0, after))
    if fault != "deadline":
        return planned
    # The server measures the deadline, so the phase is only approximate, and "last" cannot be chosen.
    phase = rng.choice(("queued", "prefill", "decode"))
    limit = {"queued": (1, 3), "prefill": (3, 40), "decode": (20, 200)}[phase]
    extra = (plan.extra or {}) | {"timeout_ms": rng.randint(*limit)}
    return replace(planned, phase=phase, delay=0.0, after=0, extra=extra)
