"""The record of one traced request, which the threads that handle the request add to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """A period of a request. Times are time.monotonic()."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str | int] = {}


@dataclass(eq=False, slots=True)
class RequestTrace:
    """The phases of a request, in the order in which they ended."""

    span: Any  # the span of the whole request, of OpenTelemetry
    epoch: int  # time.monotonic() == 0, in nanoseconds since 1970
    phases: list[Phase] = field(default_factory=list)

    def nanoseconds(self, monotonic: float) -> int:
        """Return a time of time.monotonic() in nanoseconds since 1970."""
        return self.epoch + int(monotonic * 1e9)

    def add(self, name: str, began: float, ended: float, **attributes: str | int) -> None:
        """Add a phase."""
        self.phases.append(Phase(name, began, ended, attributes))


@contextmanager
def recorded(trace: RequestTrace | None, name: str) -> Iterator[None]:
    """Add the time in the context as a phase, if the request is traced."""
    began = time.monotonic()
    yield
    if trace:
        trace.add(name, began, time.monotonic())
