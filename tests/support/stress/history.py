"""The events that clients have observed, in order: one JSON object per line.

    invoke     id, protocol; expect, texts, finish: the expected output of each sample; allowed_ends: how else it may
               end; fault, phase: of the fault injector
    tokens     id; tokens, texts: of each sample; at: the server's offset in the text of the first sample
    terminal   id; how: finish, error, left or lost; finish, error or fault; bare: whether it came without tokens
    idle       seconds until the server was idle; before, after: its footprint
    freed      id; at: the time at which the engine had dropped a request whose client had disconnected
    cycle      number; stubs, shm: processes of models, and regions of shared memory, after a model was replaced;
               before: regions before
    grows      by, most: growth of the server's memory in MiB per cycle, in the second half
    refusal    refused: whether the server rejects new connections while its last streams are still open
    probe      id of the request that is sent alone after the stress test; its invoke event follows
    stopped    code; seconds since the last stream had ended; left: remaining regions of shared memory

`t` is the time by the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.support.stress.plans import Plan

Event = dict[str, Any]


class History:
    """Writes events, and counts those that the stress tests depend on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.started: set[str] = set()  # requests with at least one token
        self.responses = 0  # responses with tokens
        self.killed = 0  # requests that a fault has ended
        self.ended: set[str] = set()
        self._with_fault: set[str] = set()

    def add(self, kind: str, **fields: Any) -> None:
        self.put({"t": round(time.monotonic(), 6), "kind": kind} | fields)

    def invoke(self, plan: Plan) -> None:
        request = plan.request
        self.add(
            "invoke",
            id=plan.id,
            protocol=plan.protocol,
            expect=request.tokens,
            texts=request.texts,
            finish=request.finish,
            allowed_ends=plan.allowed_ends,
            fault=plan.fault,
            phase=plan.phase,
        )

    def put(self, event: Event) -> None:
        if event["kind"] == "tokens":
            self.responses += 1
            self.started.add(event["id"])
        elif event["kind"] == "invoke" and event["fault"]:
            self._with_fault.add(event["id"])
        elif event["kind"] == "terminal":
            self.ended.add(event["id"])
            self.killed += event["id"] in self._with_fault and set(event.get("finish", ["timeout"])) == {"timeout"}
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")


def load(path: Path) -> Iterator[Event]:
    with path.open() as lines:
        yield from map(json.loads, lines)
