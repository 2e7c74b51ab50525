"""Profiles a running engine for some seconds: steps, Python threads, GPU kernels, and the server's threads.

The result of `paged profile`: a trace in the format of Chrome (chrome://tracing, https://ui.perfetto.dev) and figures.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.outputs import StepOutput, StepReport
from paged_backend.server.metrics.families import STEP_PHASES
from paged_backend.server.streams.responder import Responder
from paged_backend.utils.local_socket import LONGEST_PROFILE

log = logging.getLogger("paged_llm")

SAMPLE_SECONDS = 0.005
SHOWN_FUNCTIONS = 40  # functions with the most time, in the figures
STEPS, SERVER = 1, 2  # ids of rows in the trace, which no thread has
STACK_DEPTH = 60  # frames of a stack; outer ones beyond that are left out

Profile = dict[str, Any]
Event = dict[str, Any]  # an event of the Chrome trace format


class Profiler:
    """Takes one profile at a time. The responder records the steps meanwhile."""

    def __init__(self, responder: Responder):
        self._responder = responder
        self._busy = threading.Lock()

    def record(self, seconds: float) -> Profile:
        """Record for some seconds, and return the profile. Called on a thread of its own.

        Raises RequestError if another profile is being taken, or `seconds` is not in 0..LONGEST_PROFILE.
        """
        if not 0 < seconds <= LONGEST_PROFILE:
            reason = f"profile={seconds:g}: must be above 0 and at most {LONGEST_PROFILE:g} seconds"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, reason)
        if not self._busy.acquire(blocking=False):
            raise RequestError(ErrorCode.UNAVAILABLE, "another profile is being taken; try again when it has ended")
        try:
            with _GpuTrace() as gpu:
                return self._record(seconds, gpu)
        finally:
            self._responder.recorded_steps = None
            self._busy.release()

    def _record(self, seconds: float, gpu: _GpuTrace) -> Profile:
        pid, server_pid = os.getpid(), os.getppid()
        sampler, server = StackSampler(pid), _ServerThreads(server_pid)
        steps: list[StepOutput] = []
        self._responder.recorded_steps = steps
        began = now = time.monotonic()
        while now < began + seconds:
            sampler.sample(now * 1e6)
            time.sleep(SAMPLE_SECONDS)
            now = time.monotonic()
        self._responder.recorded_steps = None
        sampler.finish(now * 1e6)
        threads = server.used()
        events = [*sampler.events, *_thread_events(server_pid, threads, began, now), *_step_events(pid, steps)]
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "engine"}})
        total = sum(sampler.self_time.values()) or 1
        return {
            "seconds": now - began,
            "steps": _step_figures([step.report for step in steps if step.report], now - began),
            "functions": [
                {"thread": thread, "function": function, "share": spent / (1e6 * (now - began))}
                for (thread, function), spent in sampler.self_time.most_common(SHOWN_FUNCTIONS)
                if spent > total / 1e6
            ],
            "server_threads": threads,
            "trace": {"traceEvents": [*events, *gpu.stop()], "displayTimeUnit": "ms"},
        }


def _step_figures(reports: list[StepReport], seconds: float) -> dict[str, Any]:
    """Return the number of steps, their mean size, and the time of each phase."""
    count = len(reports)
    if not count:
        return {"count": 0}
    spent = {phase: sum(getattr(report, phase) for report in reports) for phase in STEP_PHASES}
    return {
        "count": count,
        "sequences": sum(report.num_seqs for report in reports) / count,
        "tokens": sum(report.num_tokens for report in reports) / count,
        "replayed": sum(report.replayed for report in reports),
        "phases": {phase: {"seconds": value / count, "share": value / seconds} for phase, value in spent.items()},
    }


def _step_events(pid: int, steps: list[StepOutput]) -> list[Event]:
    """Return the phases of steps as events of a row of their own. With overlap, a step's phases have gaps."""
    events: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": STEPS, "args": {"name": "steps"}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": STEPS, "args": {"sort_index": -1}},
    ]
    for step in steps:
        report = step.report
        assert report
        arrived = step.finished_at - report.commit
        starts = {
            "schedule": step.started_at,
            "launch": step.started_at + report.schedule,
            "wait": arrived - report.wait,
            "commit": arrived,
        }
        for phase, start in starts.items():
            event = {"ph": "X", "name": phase, "pid": pid, "tid": STEPS, "ts": start * 1e6}
            events.append(event | {"dur": getattr(report, phase) * 1e6, "args": asdict(report)})
    return events


def _thread_events(pid: int, threads: list[dict[str, Any]], began: float, ended: float) -> list[Event]:
    """Return an event for each thread of tritonserver. Its length shows the share of a core, not when the thread
    ran."""
    events: list[Event] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "tritonserver"}}]
    for thread in threads:
        row = {"pid": pid, "tid": thread["thread"]}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": thread["name"]}} | row)
        times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
        events.append({"ph": "X", "name": f"{thread['share']:.1%} of a core"} | times | row)
    return events


class _ServerThreads:
    """The CPU time of tritonserver's threads since this object was created."""

    def __init__(self, pid: int):
        self._pid = pid
        self._before, self._began = self._read(), time.monotonic()

    def used(self) -> list[dict[str, Any]]:
        """Return the threads that have used CPU time, and the share of a core of each, the busiest first."""
        elapsed, threads = time.monotonic() - self._began, []
        for thread, (name, ticks) in self._read().items():
            share = (ticks - self._before.get(thread, (name, 0))[1]) / os.sysconf("SC_CLK_TCK") / elapsed
            if share > 0:
                threads.append({"thread": thread, "name": name, "share": share})
        return sorted(threads, key=lambda thread: -thread["share"])

    def _read(self) -> dict[int, tuple[str, int]]:
        """Return the name and the CPU time, in clock ticks, of each thread."""
        found = {}
        for directory in Path(f"/proc/{self._pid}/task").glob("*"):
            try:
                name, fields = (directory / "comm").read_text().strip(), (directory / "stat").read_text()
            except OSError:  # the thread has ended
                continue
            user, system = fields.rpartition(")")[2].split()[11:13]
            found[int(directory.name)] = (name, int(user) + int(system))
        return found


class _GpuTrace:
    """The kernels and copies on the GPU, recorded by PyTorch's profiler. Empty without a GPU."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def __enter__(self) -> _GpuTrace:
        if torch.cuda.is_available():
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.stop()

    def stop(self) -> list[Event]:
        """Stop recording, and return the events, on the clock of time.monotonic()."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return []
        profiler.stop()
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/gpu.json"
            profiler.export_chrome_trace(path)
            trace = json.loads(Path(path).read_text())
        shift = trace.get("baseTimeNanoseconds", 0) / 1e3 - (time.time() - time.monotonic()) * 1e6
        return [event | {"ts": event["ts"] + shift} if "ts" in event else event for event in trace["traceEvents"]]


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
