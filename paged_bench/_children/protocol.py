"""The child's side of a contestant that lives in another environment: one JSON line a command, one a reply.

    {"do": "load", "with": {...}}    ->  {"ok": {...}}                 once
    {"do": "run", "with": {"jobs": [{"prompt": [ids], "output": tokens, "arrival": seconds, "n": samples}, ...]}}
        ->  {"ok": {"seconds": s, "stamps": [[s, ...], ...], "outputs": [[ids], ...]}}
    and in place of any "ok"         ->  {"error": "why"}

`stamps` are of each sequence's tokens, in seconds from its request's arrival; `outputs` are those of the first sample
of each request. It knows neither the project nor its packages: the other environment has none of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Clock:
    """Stamps of tokens, from a run's beginning."""

    def __init__(self, jobs: Sequence[Mapping[str, Any]]):
        self.jobs = jobs
        self.stamps: list[list[float]] = [[] for job in jobs for _ in range(job["n"])]
        self.outputs: list[list[int]] = [[] for _ in jobs]
        self._rows = [0]
        for job in jobs:
            self._rows.append(self._rows[-1] + job["n"])
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def tokens(self, key: int, sample: int, ids: Sequence[int], when: float) -> None:
        """Of request `key` and one of its samples, as they came."""
        self.stamps[self._rows[key] + sample] += [when - self.jobs[key]["arrival"]] * len(ids)
        if sample == 0:
            self.outputs[key] += ids

    def result(self) -> dict[str, Any]:
        return {"seconds": self.now(), "stamps": self.stamps, "outputs": self.outputs}


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands, by their names, until standard input ends. Replies have the real standard output to themselves:
    what a library prints goes to standard error. The process leads a group, in the session of who started it: if that
    one dies while the group is stopped, the kernel wakes it with a SIGHUP."""
    os.setpgrp()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply = {"ok": commands[asked["do"]](**asked["with"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
