"""A conversation that the server remembers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from client.types import Completion, PagedError
from client.wire import Message

if TYPE_CHECKING:
    from client.sync_client import Client, Stream


class Conversation:
    """A session: each turn sends what is new, and the server goes on from there. A context manager that ends it.

    One turn at a time. A turn that fails or is cancelled leaves the conversation as it was before.
    """

    def __init__(self, client: Client, sampling: Mapping[str, Any]) -> None:
        self._client = client
        self._sampling = dict(sampling)
        self._begun = False
        self._last: Stream | None = None
        self.sequence_id = secrets.randbelow(2**63 - 1) + 1

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Completion:
        """The whole answer to the next turn. Arguments and errors are those of `Client.generate`."""
        answer = self._client.generate(prompt, messages=messages, **self._turn(sampling))
        self._begun = True
        return answer

    def stream(
        self, prompt: str | None = None, *, messages: Sequence[Message] | None = None, **sampling: Any
    ) -> Stream:
        """The next turn, piece by piece. Arguments and errors are those of `Client.stream`."""
        self._last = self._client.stream(prompt, messages=messages, **self._turn(sampling))
        return self._last

    def close(self) -> None:
        """Let the server forget it."""
        turn = self._turn({})
        if not turn["sequence_start"]:
            only = {name: turn[name] for name in ("sequence_id", "cache_salt") if name in turn}
            self._client.generate("", **only, sequence_end=True)
            self._begun = False

    def _turn(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._last.completion if self._last else None
        self._begun |= answer is not None and answer.finish_reason != "cancelled"
        self._last = None
        return {
            **self._sampling,
            **sampling,
            "sequence_id": self.sequence_id,
            "sequence_start": not self._begun,
        }

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
