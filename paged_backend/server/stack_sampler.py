"""Samples the stacks of a process's Python threads, and turns them into the events of a Chrome trace."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any

STACK_DEPTH = 60  # frames of a stack; outer ones beyond that are left out

Event = dict[str, Any]  # an event of the Chrome trace format


class StackSampler:
    """Merges samples of the same call into one event.

    A call that is found in two samples is taken to have run between them. Times are in microseconds.
    """

    def __init__(self, pid: int):
        self.self_time: Counter[tuple[str, str]] = Counter()  # microseconds by thread and innermost function
        self.events: list[Event] = []
        self._pid = pid
        self._open: dict[int, list[tuple[CodeType, float]]] = {}  # thread -> its calls and when they were first seen
        self._names: dict[int, str] = {}
        self._last: float | None = None

    def sample(self, now: float) -> None:
        """Add the current stacks of all threads but the caller's."""
        elapsed = 0.0 if self._last is None else now - self._last
        self._last, own = now, threading.get_ident()
        self._names |= {thread.ident: thread.name for thread in threading.enumerate() if thread.ident is not None}
        current = {ident: _stack(frame) for ident, frame in sys._current_frames().items() if ident != own}
        for ident in self._open.keys() | current.keys():
            self._update(ident, current.get(ident, []), now)
        for ident, stack in current.items():
            if stack:
                self.self_time[self._name(ident), _label(stack[-1])] += round(elapsed)

    def finish(self, now: float) -> None:
        """End all calls."""
        for ident in list(self._open):
            self._update(ident, [], now)
        self.events += [
            {"ph": "M", "name": "thread_name", "pid": self._pid, "tid": ident, "args": {"name": self._name(ident)}}
            for ident in self._open
        ]

    def _update(self, ident: int, stack: list[CodeType], now: float) -> None:
        calls = self._open.setdefault(ident, [])
        same = next((i for i, (old, new) in enumerate(zip(calls, stack, strict=False)) if old[0] is not new), None)
        if same is None:
            same = min(len(calls), len(stack))
        for code, began in calls[same:]:
            self.events.append(
                {"ph": "X", "name": _label(code), "pid": self._pid, "tid": ident, "ts": began, "dur": now - began}
            )
        calls[same:] = [(code, now) for code in stack[same:]]

    def _name(self, ident: int) -> str:
        return self._names.get(ident, str(ident))


def _stack(frame: FrameType | None) -> list[CodeType]:
    """Return the code of a stack's functions, the outermost first."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < STACK_DEPTH:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes[::-1]


def _label(code: CodeType) -> str:
    parts = code.co_filename.rsplit("/", 2)
    return f"{getattr(code, 'co_qualname', code.co_name)} ({'/'.join(parts[-2:])}:{code.co_firstlineno})"
