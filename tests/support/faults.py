"""Fault injection, which shows that tests would notice a fault.

A fault is a name and the occurrence at which it happens, counted from 1: `{"drop_final": 20}`. The number of
`slow_steps` is a duration in milliseconds. A fault wraps one method of the objects that serve. Production code knows
nothing of this: in one process a test creates `faulty_service(faults)` in place of `Service`, and for a real server
`inject_into_repository` replaces the model.py of a repository's copy.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from paged_backend.api.request import TokenDelta
    from paged_backend.engine.assembly import Assembly
    from paged_backend.execution.batch import PackedBatch
    from paged_backend.execution.graphs import ForwardOutput
    from paged_backend.execution.runner import Runner
    from paged_backend.server.service import Service
    from paged_backend.server.wire.channel import Channel

    Outputs = Mapping[str, np.ndarray]

ROOT = Path(__file__).resolve().parents[2]
FILE = "faults.json"  # beside model.py
MODEL = f'''"""The model with injected faults: see tests/support/faults.py."""

import sys

sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "kernels")!r}, {str(ROOT / "client")!r}]

from tests.support.faulty_model import FaultyModel as TritonPythonModel
'''
Send = Callable[..., None]
log = logging.getLogger("paged_llm")


def parse(text: str) -> dict[str, int]:
    """Parse a JSON object of faults. Raises ValueError for an unknown fault or an occurrence that never comes."""
    try:
        faults = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text}: not valid JSON: {error}") from None
    if not isinstance(faults, dict):
        raise ValueError(f"{text}: must be a JSON object")
    for name, occurrence in faults.items():
        if name not in FAULTS:
            raise ValueError(f"{name}: unknown fault; known are {', '.join(FAULTS)}")
        if type(occurrence) is not int or occurrence < 1:
            raise ValueError(f"{name}={json.dumps(occurrence)}: must be a whole number of at least 1")
    return faults


def inject_into_repository(repository: Path, faults: Mapping[str, int]) -> Path:
    """Give the engine's model of a model repository, which is changed, these faults. Return the repository."""
    version = repository / "paged_llm" / "1"
    (version / FILE).write_text(json.dumps(parse(json.dumps(faults))))
    (version / "model.py").write_text(MODEL)
    return repository


def faulty_repository(directory: Path, faults: Mapping[str, int]) -> Path:
    """Copy the model repository into a new directory, with these faults in the engine's model. Return the directory."""
    source = ROOT / "model_repository"
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("__pycache__"))
    return inject_into_repository(directory, faults)


def faulty_service(faults: Mapping[str, int]) -> type[Service]:
    """Return a subclass of Service that injects faults."""
    from paged_backend.server.service import Service

    class FaultyService(Service):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            for name, occurrence in faults.items():
                log.warning("injected fault: %s at occurrence %d", name, occurrence)
                FAULTS[name](occurrence, self, self._assembly)

    return FaultyService


def _leak_block(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The last block of a released block table stays in use."""
    pool, count = assembly.scheduler.blocks.pool, itertools.count(1)
    free_table = pool.free_table

    def leak(table: list[int]) -> None:
        if table and next(count) == occurrence:
            table.pop()
        free_table(table)

    pool.free_table = leak  # type: ignore[method-assign]


def _wrong_token(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The client gets a wrong token, while the engine continues from the right one."""
    scheduler, count = assembly.scheduler, itertools.count(1)
    commit = scheduler.commit

    def wrong(delta: TokenDelta) -> TokenDelta:
        if delta.token_ids and next(count) == occurrence:
            *before, last = delta.token_ids
            return delta._replace(token_ids=(*before, last ^ 1))
        return delta

    scheduler.commit = lambda *step: [wrong(delta) for delta in commit(*step)]  # type: ignore[method-assign]


def _drop_final(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The final response of a request is not sent."""

    def drop(channel: Channel, send: Send, outputs: Outputs) -> None:
        channel.closed = True

    _replace_final_response(occurrence, service, drop)


def _double_final(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The final response of a request comes twice. The server allows one final flag, so the first of the two is final
    only by its tensors."""

    def double(channel: Channel, send: Send, outputs: Outputs) -> None:
        send(outputs, final=False)
        send(outputs, final=True)

    _replace_final_response(occurrence, service, double)


def _replace_final_response(
    occurrence: int, service: Service, instead: Callable[[Channel, Send, Outputs], None]
) -> None:
    """Let `instead` send the final response of one request."""
    handle, count = service.handle, itertools.count(1)

    def wrap(channel: Channel) -> None:
        send = channel.send

        def counted_send(outputs: Outputs, *, final: bool) -> None:
            if final and next(count) == occurrence:
                instead(channel, send, outputs)
            else:
                send(outputs, final=final)

        channel.send = counted_send  # type: ignore[method-assign]
        handle(channel)

    service.handle = wrap  # type: ignore[method-assign]


def _nan_row(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The logits of the first sampled row of a step are NaN. Occurrences are steps."""

    def poison(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        output = step()
        row = 0 if output.logit_rows is None else output.logit_rows[:1]
        output.logits[row] = float("nan")
        return output

    _replace_step(occurrence, assembly, poison)


def _out_of_memory(occurrence: int, service: Service, assembly: Assembly) -> None:
    """A step runs out of device memory."""
    import torch

    def fail(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        raise torch.OutOfMemoryError("on purpose")

    _replace_step(occurrence, assembly, fail)


def _lost_device(operation: str, occurrence: int, service: Service, assembly: Assembly) -> None:
    """The device reports an error at an operation, and from then on at each of its operations, as a GPU does after an
    illegal address."""
    import torch

    runner, count, lost = _single_runner(assembly), itertools.count(1), threading.Event()

    def use(kind: str) -> None:
        if kind == operation and next(count) == occurrence:
            lost.set()
        if lost.is_set():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def guard(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def guarded(*arguments: Any) -> Any:
            use(kind)
            return original(*arguments)

        setattr(owner, name, guarded)

    class Arrival:
        """Stands for the event of a step on a GPU."""

        def synchronize(self) -> None:
            use("synchronize")

    launch = runner.launch
    runner.launch = lambda packed: replace(launch(packed), arrived=Arrival())  # type: ignore
    guard(runner, "_forward", "launch")
    for name, kind in (("launch", "copy"), ("finish", "synchronize"), ("block", "synchronize"), ("record", "launch")):
        guard(runner.copier._queues, name, kind)
    if runner._graphs:
        guard(runner._graphs, "replay", "replay")


def _dead_engine(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The runner dies in a step, so no further step can be run."""
    from paged_backend.execution.runner import RunnerDied

    def fail(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        raise RunnerDied("on purpose")

    _replace_step(occurrence, assembly, fail)


def _stuck_step(occurrence: int, service: Service, assembly: Assembly) -> None:
    """A step never ends."""

    def hang(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        threading.Event().wait()
        raise AssertionError

    _replace_step(occurrence, assembly, hang)


def _slow_steps(milliseconds: int, service: Service, assembly: Assembly) -> None:
    """Make every step take this much longer, so that a test sees requests while they run. Not a fault."""
    runner = _single_runner(assembly)
    run = runner._run

    def slow_run(packed: PackedBatch) -> ForwardOutput:
        time.sleep(milliseconds / 1000)
        return run(packed)

    runner._run = slow_run  # type: ignore[method-assign]


def _log_drops(occurrence: int, service: Service, assembly: Assembly) -> None:
    """Log when an aborted request's blocks are free, from this occurrence on. Not a fault."""
    scheduler, engine, count = assembly.scheduler, service._engine, itertools.count(1)
    post_abort, abort, ids = engine.abort, scheduler.abort, {}
    streams = service._responder.streams

    def remember(key: int) -> None:
        if stream := streams.get(key):  # else the request has ended
            ids[key] = stream.call.request_id
        post_abort(key)

    def logged(key: int) -> bool:
        dropped, name = abort(key), ids.pop(key, "")
        if dropped and next(count) >= occurrence:
            log.info("dropped %s at %.6f", name, time.monotonic())
        return dropped

    engine.abort, scheduler.abort = remember, logged  # type: ignore[method-assign]


def _wall_clock(occurrence: int, service: Service, assembly: Assembly) -> None:
    """The wall clock of the process jumps with every request, alternately an hour ahead and an hour back."""
    handle, count, original = service.handle, itertools.count(1), (time.time, time.time_ns)

    def jump(channel: Channel) -> None:
        if (past := next(count) - occurrence) >= 0:
            hours = 1 if past % 2 == 0 else -1
            time.time = lambda: original[0]() + 3600 * hours
            time.time_ns = lambda: original[1]() + 3600 * 10**9 * hours
        handle(channel)

    service.handle = jump  # type: ignore[method-assign]


def _replace_step(
    occurrence: int, assembly: Assembly, instead: Callable[[Callable[[], ForwardOutput]], ForwardOutput]
) -> None:
    """Let `instead` compute one step."""
    runner, count = _single_runner(assembly), itertools.count(1)
    run = runner._run

    def counted_run(packed: PackedBatch) -> ForwardOutput:
        return instead(lambda: run(packed)) if next(count) == occurrence else run(packed)

    runner._run = counted_run  # type: ignore[method-assign]


def _single_runner(assembly: Assembly) -> Runner:
    from paged_backend.execution.runner import Runner

    assert isinstance(assembly.runner, Runner), "faults in steps need tensor_parallel_size=1"
    return assembly.runner


FAULTS: dict[str, Callable[[int, Service, Assembly], None]] = {
    "leak_block": _leak_block,
    "wrong_token": _wrong_token,
    "drop_final": _drop_final,
    "double_final": _double_final,
    "nan_row": _nan_row,
    "out_of_memory": _out_of_memory,
    "lost_at_launch": partial(_lost_device, "launch"),
    "lost_at_copy": partial(_lost_device, "copy"),
    "lost_at_synchronize": partial(_lost_device, "synchronize"),
    "lost_at_replay": partial(_lost_device, "replay"),
    "dead_engine": _dead_engine,
    "stuck_step": _stuck_step,
    "slow_steps": _slow_steps,
    "log_drops": _log_drops,
    "wall_clock": _wall_clock,
}
