"""Messages for the user while a model loads: the logger `paged_llm.startup`.

`paged serve` prints these messages. Those that begin with "progress: " match `PROGRESS`, and `paged serve` draws a
progress bar from them. From `ONLY_LABELS`, `ONLY_EMBEDDINGS` and `NO_CHAT` it sees which requests the model can answer.
"""

from __future__ import annotations

import logging
import re
import threading
import time

startup_log = logging.getLogger("paged_llm.startup")

INTERVAL = 0.5  # minimum seconds between two lines of one phase, except for its last one
PROGRESS = re.compile(r"progress: (?P<phase>.+) (?P<done>\d+)/(?P<total>\d+) (?P<unit>\S+)")
ONLY_LABELS = "Output: scores of labels, no text: "  # the beginning of the line that lists the labels
ONLY_EMBEDDINGS = "Output: embeddings, no text: "  # the beginning of the line that describes them
NO_CHAT = "Chat template: none, so the model completes prompts and rejects conversations"


class Progress:
    """The progress of one phase of loading, as lines of the log. May be used from several threads.

    Args:
        phase: what the server does, e.g. "loading weights".
        total: number of units of the whole phase; 0 if it is not known yet.
        unit: name of a unit. "B" for bytes.
    """

    def __init__(self, phase: str, total: int = 0, unit: str = "steps") -> None:
        self._phase, self._total, self._unit = phase, total, unit
        self._done = 0
        self._shown: tuple[int, int] | None = None
        self._next = 0.0
        self._lock = threading.Lock()
        self.update(0)

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            self._report()

    def update(self, done: int, total: int | None = None) -> None:
        with self._lock:
            self._done = done
            self._total = self._total if total is None else total
            self._report()

    def _report(self) -> None:
        state, now = (self._done, self._total), time.monotonic()
        if not self._total or state == self._shown or (self._done < self._total and now < self._next):
            return
        self._shown, self._next = state, now + INTERVAL
        startup_log.info("progress: %s %d/%d %s", self._phase, min(state), self._total, self._unit)
