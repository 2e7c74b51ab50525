"""Reads a history and finds violations, without a server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.stress.history import Event
from tests.support.stress.plans import DISCONNECTS

CLASSES = re.compile(r"(?:Error generating stream: )?(INVALID_ARGUMENT|UNAVAILABLE|CANCELLED|INTERNAL): ")
# Errors of tritonserver itself, for a model that is not loaded and for a body that is not JSON.
SERVERS_OWN = re.compile(r"Request for unknown model|is not ready|has no available versions|parse the request JSON")


class Problem(NamedTuple):
    kind: str
    id: str
    text: str


@dataclass
class Request:
    """A request and its output so far."""

    invoke: Event
    tokens: list[list[int]]
    texts: list[str]
    terminal: Event | None = None
    started: bool = False


@dataclass
class Verdict:
    """The result of a check."""

    problems: list[Problem] = field(default_factory=list)
    requests: int = 0
    responses: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    killed: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # number of requests that a fault ended, by fault and phase
    most_open: int = 0  # concurrent requests
    most_with_tokens: int = 0  # concurrent requests with at least one token
    freed: dict[str, list[float]] = field(default_factory=dict)  # seconds from a disconnect until the blocks are free
    idle_seconds: float | None = None  # the longest
    stopped_seconds: float | None = None

    @property
    def kinds(self) -> set[str]:
        return {problem.kind for problem in self.problems}

    def __str__(self) -> str:
        lines = [f"{self.requests} requests, {self.responses} responses, {self.tokens} tokens"]
        lines.append("ended by " + ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items())))
        if self.killed:
            by_way = ", ".join(f"{fault} in {phase} {count}" for (fault, phase), count in sorted(self.killed.items()))
            lines.append(f"{self.killed.total()} streams killed: {by_way}")
        if self.idle_seconds is not None:
            lines.append(f"idle after {self.idle_seconds:.2f} s at the most")
        if self.stopped_seconds is not None:
            lines.append(f"stopped in {self.stopped_seconds:.2f} s at the most")
        lines.append(f"{len(self.problems)} problems")
        lines += [f"  {problem.kind}: {problem.id}: {problem.text}" for problem in self.problems[:20]]
        return "\n".join(lines)


def check(events: Iterable[Event], *, idle_within: float = 2.0, stopped_within: float = 5.0) -> Verdict:
    """Check a history.

    Args:
        idle_within, stopped_within: limits in seconds.
    """
    return _Check(idle_within, stopped_within).run(events)


def error_class(text: str) -> str | None:
    """Return the error class of a message, "SERVER" for errors of tritonserver, and None for an unknown one."""
    if ours := CLASSES.match(text):
        return ours.group(1)
    return "SERVER" if SERVERS_OWN.search(text) else None


class _Check:
    def __init__(self, idle_within: float, stopped_within: float) -> None:
        self._idle_within, self._stopped_within = idle_within, stopped_within
        self._requests: dict[str, Request] = {}
        self._probes: list[str] = []
        self._open = self._with_tokens = 0
        self._verdict = Verdict()

    def run(self, events: Iterable[Event]) -> Verdict:
        for event in events:
            getattr(self, f"_{event['kind']}")(event)
        for id, request in self._requests.items():
            if request.terminal is None:
                self._problem("lost", id, "has no end in the history")
        for id in self._probes:
            if id not in self._requests or self._outcome(self._requests[id]) != "finish":
                self._problem("no probe", id, "the server did not respond after the stress test")
        return self._verdict

    def _problem(self, kind: str, id: str, text: str) -> None:
        self._verdict.problems.append(Problem(kind, id, text))

    def _invoke(self, event: Event) -> None:
        id, samples = event["id"], len(event["expect"])
        if id in self._requests:
            self._problem("double invoke", id, "the same id twice")
        self._requests[id] = Request(event, [[] for _ in range(samples)], [""] * samples)
        self._verdict.requests += 1
        self._open += 1
        self._verdict.most_open = max(self._verdict.most_open, self._open)

    def _tokens(self, event: Event) -> None:
        id, request = event["id"], self._requests[event["id"]]
        self._verdict.responses += 1
        self._verdict.tokens += sum(map(len, event["tokens"]))
        if request.terminal:
            self._problem("after terminal", id, f"{event['tokens']} after its end")
        if len(event["tokens"]) != len(request.tokens):
            self._problem("samples", id, f"{len(event['tokens'])} in a response, {len(request.tokens)} were requested")
            return
        if event["at"] is not None and event["at"] != len(request.texts[0]):
            self._problem("gap", id, f"text from {event['at']} on, after {len(request.texts[0])} characters")
        if not request.started and not request.terminal:
            request.started = True
            self._with_tokens += 1
            self._verdict.most_with_tokens = max(self._verdict.most_with_tokens, self._with_tokens)
        for index, (tokens, text) in enumerate(zip(event["tokens"], event["texts"], strict=True)):
            request.tokens[index] += tokens
            request.texts[index] += text
            self._compare_with_expected(request, index)

    def _compare_with_expected(self, request: Request, index: int) -> None:
        got, expected = request.tokens[index], request.invoke["expect"][index]
        if got != expected[: len(got)]:
            wrong = next(at for at, token in enumerate(got) if at >= len(expected) or token != expected[at])
            self._problem(
                "wrong token", request.invoke["id"], f"sample {index}: {got} differs from {expected} at {wrong}"
            )
            request.invoke["expect"][index] = got + expected[len(got) :]  # report it once
        elif not request.invoke["texts"][index].startswith(request.texts[index]):
            text = request.invoke["texts"][index]
            self._problem(
                "wrong text", request.invoke["id"], f"sample {index}: {request.texts[index]!r} is not {text!r}"
            )

    def _terminal(self, event: Event) -> None:
        id, request = event["id"], self._requests[event["id"]]
        self._verdict.responses += event.get("bare", False)
        if request.terminal:
            self._problem("double terminal", id, f"{_describe(request.terminal)}, then {_describe(event)}")
            return
        request.terminal = event
        self._open -= 1
        self._with_tokens -= request.started
        outcome = self._outcome(request)
        self._verdict.outcomes[outcome] += 1
        invoke = request.invoke
        if invoke["fault"] and outcome != "finish":
            # The phase of a client that was killed is known from its tokens.
            phase = invoke["phase"] or ("decode" if any(request.tokens) else "queued")
            self._verdict.killed[invoke["fault"], phase] += 1
        if event["how"] == "lost":
            self._problem("lost", id, event["why"])
        elif event["how"] == "finish":
            self._check_finish(request, event["finish"])
        elif event["how"] == "error" and error_class(event["error"]) is None:
            self._problem("unknown error", id, event["error"])
        if outcome not in ("lost", "unknown error") and outcome not in ("finish", *invoke["allowed_ends"]):
            self._problem("unexpected end", id, _describe(event))

    def _outcome(self, request: Request) -> str:
        event: Any = request.terminal
        if event is None:
            return "lost"
        if event["how"] == "error":
            return error_class(event["error"]) or "unknown error"
        if event["how"] == "finish" and "timeout" in event["finish"]:
            return "timeout"
        return event["how"]

    def _check_finish(self, request: Request, finish: list[str]) -> None:
        id, invoke = request.invoke["id"], request.invoke
        if "timeout" in finish:
            return  # with some of the tokens
        if finish != invoke["finish"]:
            self._problem("wrong finish", id, f"{finish} is not {invoke['finish']}")
        for index, expected in enumerate(invoke["expect"]):
            if len(request.tokens[index]) < len(expected):
                count = len(request.tokens[index])
                self._problem("missing tokens", id, f"sample {index}: {count} of {len(expected)} came")
            elif request.texts[index] != invoke["texts"][index]:
                self._problem("wrong text", id, f"sample {index}: {request.texts[index]!r}")

    def _probe(self, event: Event) -> None:
        self._probes.append(event["id"])

    def _freed(self, event: Event) -> None:
        """Record the delay for a client that disconnected by itself.

        Over HTTP, a server notices a disconnect only with its next response.
        """
        request = self._requests.get(event["id"])
        if request and request.terminal and request.terminal.get("fault") in DISCONNECTS:
            noticed = request.started or request.invoke["protocol"] == "grpc"
            name = "noticed" if noticed else "over HTTP before a token"
            self._verdict.freed.setdefault(name, []).append(event["at"] - request.terminal["t"])

    def _raised(self, event: Event) -> None:
        self._problem("exception", "server", event["what"])

    def _cycle(self, event: Event) -> None:
        if event["stubs"] != 1 or event["shm"] != event["before"]:
            what = f"{event['stubs']} processes, {event['shm']} regions, of which there were {event['before']}"
            self._problem("leak", f"cycle {event['number']}", what)

    def _grows(self, event: Event) -> None:
        if event["by"] > event["most"]:
            self._problem("leak", "server", f"grows by {event['by']:.2g} MiB a cycle, more than {event['most']}")

    def _refusal(self, event: Event) -> None:
        if not event["refused"]:
            self._problem("bad stop", "server", "accepts connections until its last stream has ended")

    def _idle(self, event: Event) -> None:
        before, after, verdict = event["before"], event["after"], self._verdict
        verdict.idle_seconds = max(verdict.idle_seconds or 0, event["seconds"])
        if after["free"] + after["cached"] != after["total"] or after["used"]:
            self._problem("leak", "blocks", f"of {after['total']} {after['used']} are in use, {after['free']} free and"
                          f" {after['cached']} cached")  # fmt: skip
        for name in ("running", "waiting"):
            if after[name]:
                self._problem("leak", name, f"{after[name]} requests")
        for process, held in before["processes"].items():
            now = after["processes"].get(process, {})
            for name in held:
                if held[name] != now.get(name):
                    self._problem("leak", f"{name} of {process}", f"{held[name]} before, {now.get(name)} after")
        if before["shm"] != after["shm"]:
            self._problem("leak", "shared memory", f"{before['shm']} before, {after['shm']} after")
        if event["seconds"] > self._idle_within:
            self._problem("slow", "idle", f"only after {event['seconds']:.1f} s")

    def _stopped(self, event: Event) -> None:
        verdict = self._verdict
        verdict.stopped_seconds = max(verdict.stopped_seconds or 0, event["seconds"])
        if event["code"] != 0:
            self._problem("bad stop", "server", f"exits with {event['code']}")
        if event["left"]:
            self._problem("bad stop", "server", f"leaves {event['left']} regions of shared memory")
        if event["seconds"] > self._stopped_within:
            self._problem("slow", "stop", f"only after {event['seconds']:.1f} s")


def _describe(terminal: Event) -> str:
    how = terminal["how"]
    return f"{how} {terminal.get({'left': 'fault', 'lost': 'why'}.get(how, how))}"
