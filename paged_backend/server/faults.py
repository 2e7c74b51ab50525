"""Faults on purpose, so that tests can see that they would be noticed.

The environment variable PAGED_FAULTS holds a JSON object, `{"drop_final": 20}`: which fault, and at which occurrence,
from 1 on. It is read once, when a model is loaded. A fault is a wrapper around one method of the objects that serve;
where none is asked for there is no wrapper, so that nothing is asked while requests run.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from paged_backend.api.errors import ConfigError
from paged_backend.execution.runner import Runner, RunnerDied
from paged_backend.server.channel import Channel

if TYPE_CHECKING:
    from paged_backend.api.request import TokenDelta
    from paged_backend.engine.assembly import Assembly
    from paged_backend.execution.batch import PackedBatch
    from paged_backend.execution.graphs import ForwardOutput
    from paged_backend.server.service import Service

VARIABLE = "PAGED_FAULTS"
log = logging.getLogger("paged_llm")


def read(environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The faults that are asked for. Raises ConfigError for an unknown one, or one that never comes."""
    text = environment.get(VARIABLE) or "{}"
    try:
        asked = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}={text}: not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ConfigError(f"{VARIABLE}={text}: must be a JSON object")
    for name, when in asked.items():
        if name not in FAULTS:
            raise ConfigError(f"{VARIABLE}: {name}: unknown fault; known are {', '.join(FAULTS)}")
        if type(when) is not int or when < 1:
            raise ConfigError(f"{VARIABLE}: {name}={json.dumps(when)}: must be a whole number of at least 1")
    return asked


def inject(faults: Mapping[str, int], service: Service, assembly: Assembly) -> None:
    """Before the service's threads start."""
    for name, when in faults.items():
        log.warning("a fault on purpose (%s): %s at occurrence %d", VARIABLE, name, when)
        FAULTS[name](when, service, assembly)


def _leak_block(when: int, service: Service, assembly: Assembly) -> None:
    """The last block of a table that is let go of stays in use."""
    blocks, count = assembly.scheduler.blocks, itertools.count(1)
    release = blocks.release

    def leak(table: list[int]) -> None:
        if table and next(count) == when:
            table.pop()
        release(table)

    blocks.release = leak  # type: ignore[method-assign]


def _wrong_token(when: int, service: Service, assembly: Assembly) -> None:
    """A token of an output is another one: the engine goes on from the right one, the client gets this."""
    scheduler, count = assembly.scheduler, itertools.count(1)
    commit = scheduler.commit

    def wrong(delta: TokenDelta) -> TokenDelta:
        if delta.token_ids and next(count) == when:
            *before, last = delta.token_ids
            return delta._replace(token_ids=(*before, last ^ 1))
        return delta

    scheduler.commit = lambda *step: [wrong(delta) for delta in commit(*step)]  # type: ignore[method-assign]


def _drop_final(when: int, service: Service, assembly: Assembly) -> None:
    """The last response of an answer is not sent."""

    def drop(channel: Channel, send: Send, outputs: Outputs) -> None:
        channel.closed = True

    _last_response(when, service, drop)


def _double_final(when: int, service: Service, assembly: Assembly) -> None:
    """The last response of an answer comes twice. The server lets only one be the final one, so the first says so in
    its tensors alone."""

    def double(channel: Channel, send: Send, outputs: Outputs) -> None:
        send(outputs, final=False)
        send(outputs, final=True)

    _last_response(when, service, double)


Outputs = Mapping[str, np.ndarray]
Send = Callable[..., None]


def _last_response(when: int, service: Service, instead: Callable[[Channel, Send, Outputs], None]) -> None:
    """Have `instead` send the last response of one answer."""
    handle, count = service.handle, itertools.count(1)

    def watch(channel: Channel) -> None:
        send = channel.send

        def sends(outputs: Outputs, *, final: bool) -> None:
            if final and next(count) == when:
                instead(channel, send, outputs)
            else:
                send(outputs, final=final)

        channel.send = sends  # type: ignore[method-assign]
        handle(channel)

    service.handle = watch  # type: ignore[method-assign]


def _nan_row(when: int, service: Service, assembly: Assembly) -> None:
    """The logits of one row are no numbers: of the first that draws in a step, counted in steps."""

    def poison(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        forwarded = step()
        row = 0 if forwarded.draw_rows is None else forwarded.draw_rows[:1]
        forwarded.logits[row] = float("nan")
        return forwarded

    _step(when, assembly, poison)


def _out_of_memory(when: int, service: Service, assembly: Assembly) -> None:
    """A step finds no memory on the device."""

    def fail(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        raise torch.OutOfMemoryError("on purpose")

    _step(when, assembly, fail)


def _dead_engine(when: int, service: Service, assembly: Assembly) -> None:
    """No further step can be run."""

    def die(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        raise RunnerDied("on purpose")

    _step(when, assembly, die)


def _stuck_step(when: int, service: Service, assembly: Assembly) -> None:
    """A step never ends."""

    def hang(step: Callable[[], ForwardOutput]) -> ForwardOutput:
        threading.Event().wait()
        raise AssertionError

    _step(when, assembly, hang)


def _tell_drops(when: int, service: Service, assembly: Assembly) -> None:
    """No fault but a witness: from this one on, the log tells when a request is dropped and its blocks are free."""
    scheduler, engine, count = assembly.scheduler, service._engine, itertools.count(1)
    ask, abort, ids = engine.abort, scheduler.abort, {}
    streams = service._responder.streams.by_key

    def asks(key: int) -> None:
        if stream := streams.get(key):  # else it has been answered
            ids[key] = stream.call.request_id
        ask(key)

    def tells(key: int) -> bool:
        dropped, name = abort(key), ids.pop(key, "")
        if dropped and next(count) >= when:
            log.info("dropped %s at %.6f", name, time.monotonic())
        return dropped

    engine.abort, scheduler.abort = asks, tells  # type: ignore[method-assign]


def _wall_clock(when: int, service: Service, assembly: Assembly) -> None:
    """The wall clock of this process goes an hour ahead, and with the next request an hour back, in turn."""
    handle, count, own = service.handle, itertools.count(1), (time.time, time.time_ns)

    def jump(channel: Channel) -> None:
        if (late := next(count) - when) >= 0:
            hours = 1 if late % 2 == 0 else -1
            time.time = lambda: own[0]() + 3600 * hours
            time.time_ns = lambda: own[1]() + 3600 * 10**9 * hours
        handle(channel)

    service.handle = jump  # type: ignore[method-assign]


def _step(when: int, assembly: Assembly, instead: Callable[[Callable[[], ForwardOutput]], ForwardOutput]) -> None:
    """Have `instead` compute one step."""
    runner, count = assembly.runner, itertools.count(1)
    if not isinstance(runner, Runner):
        raise ConfigError(f"{VARIABLE}: faults of steps need tensor_parallel_size=1")
    run = runner._run

    def runs(packed: PackedBatch) -> ForwardOutput:
        return instead(lambda: run(packed)) if next(count) == when else run(packed)

    runner._run = runs  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int, Service, Assembly], None]] = {
    "leak_block": _leak_block,
    "wrong_token": _wrong_token,
    "drop_final": _drop_final,
    "double_final": _double_final,
    "nan_row": _nan_row,
    "out_of_memory": _out_of_memory,
    "dead_engine": _dead_engine,
    "stuck_step": _stuck_step,
    "tell_drops": _tell_drops,
    "wall_clock": _wall_clock,
}
