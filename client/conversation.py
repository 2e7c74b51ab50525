"""A conversation that the server remembers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from client.types import Completion, PagedError
from client.wire import Message

if TYPE_CHECKING:
    from client.sync_client import Client, Stream

Answer = TypeVar("Answer")
PATIENCE, POLL = 10.0, 0.02  # seconds
BUSY, GONE = "its last turn is not answered yet", "no such session"  # in the server's words


class Conversation:
    """A session: each turn sends what is new, and the server goes on from there. A context manager that ends it.

    One turn at a time. A turn that fails or is cancelled leaves the conversation as it was before.
    """

    def __init__(self, client: Client, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._sampling = dict(sampling)
        self._begun = False
        self._last: Stream | None = None
        self._cancelled = False  # whether the last turn was: the server may be a moment behind
        self.sequence_id = secrets.randbelow(2**63 - 1) + 1

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """The whole answer to the next turn. Arguments and errors are those of `Client.generate`."""
        turn = self._turn(sampling)
        answer = self._patiently(lambda: self._client.generate(prompt, messages=messages, **turn))
        self._begun = True
        return answer

    def stream(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Stream:
        """The next turn, piece by piece. Arguments and errors are those of `Client.stream`."""
        turn = self._turn(sampling)

        def open_stream() -> Stream:
            stream = self._client.stream(prompt, messages=messages, **turn)
            if self._cancelled:
                stream.peek()  # a refusal comes with the first response
            return stream

        self._last = self._patiently(open_stream)
        return self._last

    def close(self) -> None:
        """Let the server forget it."""
        turn = self._turn({})
        if not turn["sequence_start"]:
            only = {name: turn[name] for name in ("sequence_id", "cache_salt") if name in turn}
            try:
                self._patiently(lambda: self._client.generate("", **only, sequence_end=True))
            except PagedError as error:
                if GONE not in error.message:  # it has expired
                    raise
            self._begun = False

    def _turn(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._last.completion if self._last else None
        self._cancelled = answer is not None and answer.finish_reason == "cancelled"
        self._begun |= answer is not None and not self._cancelled
        self._last = None
        return {
            **self._sampling,
            **sampling,
            "sequence_id": self.sequence_id,
            "sequence_start": not self._begun,
        }

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """Ask again while the server has not seen yet that the last turn was cancelled."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return ask()
            except PagedError as error:
                if not self._cancelled or BUSY not in error.message or time.monotonic() > deadline:
                    raise
            time.sleep(POLL)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(PagedError):  # the error that is under way says more
            self.close()
