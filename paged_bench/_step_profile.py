"""Profiles the engine's decode steps by part."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any

from paged_backend.scheduling.plan import Plan
from paged_kernels.cpu import native

PARTS = {  # functions and methods of each part; the remaining time is "rest"
    "linears and activation": (
        "torch.nn.functional.linear",
        "paged_kernels.ops.swiglu",
    ),
    "attention": ("paged_kernels.ops.paged_attention",),
    "rotate and write": (
        "paged_kernels.ops.rope_kv_write",
        "paged_kernels.ops.latent_kv_write",
        "paged_kernels.ops.kv_write",
    ),
    "norms": ("paged_kernels.ops.add_rms_norm",),
    "sampling": ("paged_backend.sampling.sampler.sample",),
    "schedule and pack": (
        "paged_backend.scheduling.scheduler.Scheduler.schedule",
        "paged_backend.scheduling.scheduler.Scheduler.commit",
        "paged_backend.execution.batch.pack",
    ),
}
NATIVE_PARTS = {  # C++ operations measure their own time, because one call may have several of them
    "linear": "linears and activation",  # which includes the norms of their inputs
    "paged_attention": "attention",
    "rope_kv_write": "rotate and write",
    "add_rms_norm": "norms",
    "swiglu": "linears and activation",
    "best_tokens": "sampling",
}
INSIDE_LINEARS = ("norms",)  # parts that a kernel for a whole model computes in its linear layers
REST = "rest"
BOUNDARY = "paged_backend.scheduling.scheduler.Scheduler.schedule"  # the first call of every step


@dataclass
class Step:
    """One iteration of the engine loop."""

    began: float
    sequences: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # seconds by part, without nested parts
    before: dict[str, float] = field(default_factory=dict)  # C++ seconds so far when the step began, by part

    def by_part(self, later: Step) -> dict[str, float]:
        """Return the seconds of each part. `later` is the next step, whose `before` has the C++ seconds of this one."""
        inside = {part: later.before[part] - seconds for part, seconds in self.before.items()}
        return {part: inside.get(part, 0.0) + self.seconds.get(part, 0.0) for part in PARTS}


def decode_step(run: Callable[[], object], sequences: int) -> dict[str, float]:
    """Return the median seconds of each part, in the steps of `run` that decode one token of `sequences` sequences.

    The timers take about a microsecond per call. Raises ValueError if there is no such step, or a part is never called.
    """
    with _timed() as steps:
        run()
    kept = [
        (step.by_part(later), later.began - step.began)
        for step, later in pairwise(steps)
        if step.sequences == step.tokens == sequences and later.sequences
    ]
    if not kept:
        raise ValueError(f"no step decodes {sequences} sequences and nothing else")
    medians = {part: statistics.median(seconds[part] for seconds, _ in kept) for part in PARTS}
    if silent := [part for part, seconds in medians.items() if not (seconds or part in INSIDE_LINEARS)]:
        raise ValueError(f"never called in a decode step: {', '.join(silent)}; update PARTS")
    return medians | {REST: max(0.0, statistics.median(whole for _, whole in kept) - sum(medians.values()))}


@contextmanager
def _timed() -> Iterator[list[Step]]:
    steps: list[Step] = []
    inner: list[float] = []  # seconds of nested parts, for each open call
    changed: list[tuple[Any, str, Any]] = []

    def timed(part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            if name == BOUNDARY:
                steps.append(Step(began, before=_native_seconds() if compiled else {}))
            inner.append(0.0)
            result = function(*args, **options)
            whole = time.perf_counter() - began
            mine = whole - inner.pop()
            if inner:
                inner[-1] += whole
            if steps:
                steps[-1].seconds[part] = steps[-1].seconds.get(part, 0.0) + mine
            if isinstance(result, Plan):
                steps[-1].sequences, steps[-1].tokens = len(result.chunks), result.num_tokens
            return result

        return call

    compiled = bool(native.levels())
    for part, names in PARTS.items():
        for name in names:
            if compiled and name.startswith("paged_kernels.ops."):
                continue
            for place, attribute, function in _bindings(name):
                changed.append((place, attribute, function))
                setattr(place, attribute, timed(part, name, function))
    try:
        yield steps
    finally:
        for place, attribute, function in changed:
            setattr(place, attribute, function)


def _native_seconds() -> dict[str, float]:
    parts = dict.fromkeys(NATIVE_PARTS.values(), 0.0)
    for kind, seconds in native.seconds().items():
        parts[NATIVE_PARTS[kind]] += seconds
    return parts


def _bindings(name: str) -> Sequence[tuple[Any, str, Any]]:
    """Return all places where a function is bound: its module and our modules that import it, or its class."""
    owner, _, attribute = name.rpartition(".")
    if owner.rpartition(".")[2][0].isupper():
        module, _, kind = owner.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
        return [(owner, attribute, vars(owner)[attribute])]
    home = importlib.import_module(owner)
    function = getattr(home, attribute)
    ours = [module for key, module in sys.modules.items() if key.split(".")[0] in ("paged_backend", "paged_kernels")]
    return [
        (module, key, function) for module in {home, *ours} for key, value in vars(module).items() if value is function
    ]
