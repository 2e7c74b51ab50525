"""Sessions: conversations whose messages and KV cache the server keeps. The base class and the synchronous class."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar

from paged_client.stream import StreamBase
from paged_client.sync_stream import Stream
from paged_client.types import Completion, PagedError
from paged_client.wire import Message, Prompt

T = TypeVar("T")
RETRY_SECONDS, RETRY_INTERVAL = 10.0, 0.02
SESSION_BUSY, SESSION_NOT_FOUND = "its previous turn is still running", "no such session"  # texts of server errors


class ConversationBase:
    """The state of a session: whether it was started on the server, and how its last turn ended."""

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        self._sampling = dict(sampling)
        self._started = False
        self._last: StreamBase | None = None
        self._generate_failed = False  # whether the last turn was a `generate` that raised
        self._cancelled = False  # whether the last turn was cancelled, which the server may not have noticed yet
        self._retry_until = 0.0  # time until which the next turn is retried while `_cancelled`
        self.sequence_id = secrets.randbelow(2**63 - 1) + 1

    def _next_turn(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of the next turn."""
        last = self._last.completion if self._last else None
        cancelled = last is not None and last.finish_reason == "cancelled"
        self._started |= last is not None and not cancelled
        self._cancelled, self._last, self._generate_failed = cancelled or self._generate_failed, None, False
        self._retry_until = time.monotonic() + RETRY_SECONDS
        return {
            **self._sampling,
            **sampling,
            "sequence_id": self.sequence_id,
            "sequence_start": not self._started,
        }

    @contextmanager
    def _track_turn(self) -> Iterator[None]:
        """Record the result of a `generate`, which a timeout or the cancellation of its task may end."""
        try:
            yield
        except BaseException:
            self._generate_failed = True
            raise
        self._started = True

    def _end_parameters(self) -> dict[str, Any] | None:
        """Return the parameters of the request that ends the session; None if the session was never started."""
        turn = self._next_turn({})
        if turn["sequence_start"]:
            return None
        self._started = False
        return {name: turn[name] for name in ("sequence_id", "cache_salt") if name in turn} | {"sequence_end": True}

    def _should_retry(self, error: PagedError) -> bool:
        """Return whether the session is busy only because the server has not noticed the last cancellation yet."""
        return self._cancelled and SESSION_BUSY in error.message and time.monotonic() < self._retry_until


class Generator(Protocol):
    """The methods of Client that a session uses."""

    def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion: ...

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Stream: ...


class Conversation(ConversationBase):
    """A session: each turn sends only the new messages. A context manager that ends the session on exit.

    Turns run one at a time. A turn that fails or is cancelled leaves the session as it was before it.
    """

    def __init__(self, client: Generator, sampling: Mapping[str, Any]) -> None:
        super().__init__(sampling)
        self._client = client

    def generate(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """Run the next turn and return its completion. Arguments and errors as for `Client.generate`."""
        turn = self._next_turn(sampling)
        with self._track_turn():
            return self._with_retries(lambda: self._client.generate(prompt, messages=messages, **turn))

    def stream(
        self, prompt: Prompt | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Stream:
        """Run the next turn as a stream. Arguments and errors as for `Client.stream`."""
        turn = self._next_turn(sampling)

        def open_stream() -> Stream:
            stream = self._client.stream(prompt, messages=messages, **turn)
            if self._cancelled:
                stream.peek()  # a rejection arrives as the first response
            return stream

        self._last = stream = self._with_retries(open_stream)
        return stream

    def close(self) -> None:
        """End the session on the server."""
        end = self._end_parameters()
        if end:
            try:
                self._with_retries(lambda: self._client.generate("", **end))
            except PagedError as error:
                if SESSION_NOT_FOUND not in error.message:  # an expired session does not have to be ended
                    raise

    def _with_retries(self, send: Callable[[], T]) -> T:
        while True:
            try:
                return send()
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
        with suppress(PagedError):  # the exception that is propagating is more informative
            self.close()
