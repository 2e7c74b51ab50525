"""A conversation that the server remembers: what the synchronous and the asyncio one have in common, and the former."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from client.stream import StreamBase
from client.types import Completion, PagedError
from client.wire import Message, Prompt

if TYPE_CHECKING:
    from client.sync_client import Client, Stream

Answer = TypeVar("Answer")
PATIENCE, RETRY_INTERVAL = 10.0, 0.02  # seconds
BUSY, SESSION_NOT_FOUND = "its last turn is not answered yet", "no such session"  # in the server's words


class ConversationBase:
    """Which turn is next, and how the last one ended."""

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        self._sampling = dict(sampling)
        self._begun = False
        self._last: StreamBase | None = None
        self._broken_off = False  # whether the last turn had no stream, and no answer either
        self._cancelled = False  # whether the last turn was: the server may be a moment behind
        self._deadline = 0.0  # until when the next one is asked again because of that
        self.sequence_id = secrets.randbelow(2**63 - 1) + 1

    def _turn(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._last.completion if self._last else None
        cancelled = answer is not None and answer.finish_reason == "cancelled"
        self._begun |= answer is not None and not cancelled
        self._cancelled, self._last, self._broken_off = cancelled or self._broken_off, None, False
        self._deadline = time.monotonic() + PATIENCE
        return {
            **self._sampling,
            **sampling,
            "sequence_id": self.sequence_id,
            "sequence_start": not self._begun,
        }

    @contextmanager
    def _track_turn(self) -> Iterator[None]:
        """Around a turn without a stream, which may be broken off by a time limit or with its task."""
        try:
            yield
        except BaseException:
            self._broken_off = True
            raise
        self._begun = True

    def _end(self) -> dict[str, Any] | None:
        """What ends it, if it was begun."""
        turn = self._turn({})
        if turn["sequence_start"]:
            return None
        self._begun = False
        return {name: turn[name] for name in ("sequence_id", "cache_salt") if name in turn} | {"sequence_end": True}

    def _should_retry(self, error: PagedError) -> bool:
        """Whether the server has not seen yet that the last turn was cancelled, and is to be asked again."""
        return self._cancelled and BUSY in error.message and time.monotonic() < self._deadline


class Conversation(ConversationBase):
    """A session: each turn sends what is new, and the server goes on from there. A context manager that ends it.

    One turn at a time. A turn that fails or is cancelled leaves the conversation as it was before.
    """

    def __init__(self, client: Client, sampling: Mapping[str, Any]) -> None:
        super().__init__(sampling)
        self._client = client

    def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """The whole answer to the next turn. Arguments and errors are those of `Client.generate`."""
        turn = self._turn(sampling)
        with self._track_turn():
            return self._patiently(lambda: self._client.generate(prompt, messages=messages, **turn))

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Stream:
        """The next turn, piece by piece. Arguments and errors are those of `Client.stream`."""
        turn = self._turn(sampling)

        def open_stream() -> Stream:
            stream = self._client.stream(prompt, messages=messages, **turn)
            if self._cancelled:
                stream.peek()  # a refusal comes with the first response
            return stream

        self._last = stream = self._patiently(open_stream)
        return stream

    def close(self) -> None:
        """Let the server forget it."""
        end = self._end()
        if end:
            try:
                self._patiently(lambda: self._client.generate("", **end))
            except PagedError as error:
                if SESSION_NOT_FOUND not in error.message:  # it has expired
                    raise

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        while True:
            try:
                return ask()
            except PagedError as error:
                if not self._should_retry(error):
                    raise
            time.sleep(RETRY_INTERVAL)

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
