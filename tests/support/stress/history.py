"""What clients saw, in order: one JSON object a line.

    invoke     id, face, expect, texts, finish: what it gets alone, of each sample; may: how else it may end; way,
               phase: of the nemesis
    tokens     id, tokens: of each sample; texts; at: where the server says that the text of the first sample begins
    terminal   id, how: finish, error, left or lost; finish or error or way; bare: whether the response had no tokens
    idle       seconds until it was; before, after: what the server held
    freed      id, at: the time at which the engine had dropped one that its client had left
    cycle      number; stubs, shm: processes of models, and regions of shared memory, after a model was replaced;
               before: regions before
    grows      by, most: MiB of the server's memory a cycle, in the second half
    knocked    refused: whether the server lets nobody in, while its last streams go on
    probe      what was asked alone after the storm: the invoke that follows has this id
    stopped    code; seconds since its last stream had ended; left: of its shared memory

`t` is the time by a monotonic clock, which all processes of a machine share.
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
    def __init__(self, file: TextIO):
        self._file = file
        self.begun: set[str] = set()  # requests that have had a token
        self.responses = 0  # with tokens
        self.killed = 0  # that have ended, and not well, by the nemesis' hand
        self.ended: set[str] = set()
        self._doomed: set[str] = set()

    def add(self, kind: str, **fields: Any) -> None:
        self.put({"t": round(time.monotonic(), 6), "kind": kind} | fields)

    def invoke(self, plan: Plan) -> None:
        ask = plan.ask
        self.add(
            "invoke", id=plan.id, face=plan.face, expect=ask.tokens, texts=ask.texts, finish=ask.finish, may=plan.may,
            way=plan.way, phase=plan.phase,
        )  # fmt: skip

    def put(self, event: Event) -> None:
        if event["kind"] == "tokens":
            self.responses += 1
            self.begun.add(event["id"])
        elif event["kind"] == "invoke" and event["way"]:
            self._doomed.add(event["id"])
        elif event["kind"] == "terminal":
            self.ended.add(event["id"])
            self.killed += event["id"] in self._doomed and set(event.get("finish", ["timeout"])) == {"timeout"}
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")


def load(path: Path) -> Iterator[Event]:
    with path.open() as lines:
        yield from map(json.loads, lines)
