"""The protocol of contestants in other environments, on the side of the child: one line of JSON per command and reply.

    {"do": "load", "with": {...}}    ->  {"ok": {...}}                 once
    {"do": "run", "with": {"jobs": [{"prompt": [ids], "output": tokens, "arrival": seconds, "n": samples}, ...]}}
        ->  {"ok": {"seconds": s, "stamps": [[s, ...], ...], "outputs": [[ids], ...]}}
    instead of "ok", after an error  ->  {"error": "reason"}

`stamps` are the times of each sequence's tokens, in seconds since the arrival of its request. `outputs` are the tokens
of the first sample of each request. This module imports nothing of the project, which the other environment does not
have.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]


class Clock:
    """Records the times of tokens, relative to the start of a run."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.stamps: list[list[float]] = [[] for job in jobs for _ in range(job["n"])]
        self.outputs: list[list[int]] = [[] for _ in jobs]
        self._rows = [0]
        for job in jobs:
            self._rows.append(self._rows[-1] + job["n"])
        self._start = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    def tokens(self, key: int, sample: int, ids: list[int], when: float) -> None:
        """Record new tokens of a sample of request `key`."""
        self.stamps[self._rows[key] + sample] += [when - self.jobs[key]["arrival"]] * len(ids)
        if sample == 0:
            self.outputs[key] += ids

    def result(self) -> dict[str, Any]:
        """Return the result of the command "run"."""
        return {"seconds": self.now(), "stamps": self.stamps, "outputs": self.outputs}


def serve(commands: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Run commands by name until standard input ends.

    Only replies go to standard output; what libraries print goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any]
        try:
            reply = {"ok": commands[command["do"]](**command["with"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
