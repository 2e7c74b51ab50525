"""Messages to the responder's thread.

Each message calls the method of `MessageHandler` that it is for, so the responder needs no case analysis. What the
engine emits (engine/outputs.py) has the same `dispatch` method and goes through the same queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paged_backend.engine.outputs import OutputHandler
from paged_backend.server.streams.polling import PollResult
from paged_backend.server.streams.stream import Stream
from paged_backend.server.wire.channel import Channel


class MessageHandler(OutputHandler, Protocol):
    """One method per message class; the last four handle the engine's messages."""

    def on_stream_opened(self, stream: Stream) -> None: ...
    def on_prompt_tokenized(self, opened: Stream, tokenized: Stream) -> None: ...
    def on_rejected(self, outcome: str) -> None: ...
    def on_requests_moved(self, count: int) -> None: ...
    def on_cancel(self, channel: Channel, request_id: str) -> None: ...
    def on_pool_map_request(self, channel: Channel, arrived: float) -> None: ...
    def on_clients_polled(self, result: PollResult[Stream]) -> None: ...
    def on_stop(self) -> None: ...


class Message(Protocol):
    def dispatch(self, handler: MessageHandler) -> None: ...


@dataclass(frozen=True, eq=False)
class StreamOpened:
    """A request was admitted. Sent before the engine gets the request."""

    stream: Stream

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_stream_opened(self.stream)


@dataclass(frozen=True, eq=False)
class PromptTokenized:
    """The long prompt of an open stream was tokenized; `tokenized` has its request and samples."""

    opened: Stream
    tokenized: Stream

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_prompt_tokenized(self.opened, self.tokenized)


@dataclass(frozen=True)
class Rejected:
    """A request was answered with an error at admission and never became a stream."""

    outcome: str  # the `reason` label of paged_requests_finished_total

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_rejected(self.outcome)


@dataclass(frozen=True)
class RequestsMoved:
    """Requests were moved to another instance of the model."""

    count: int

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_requests_moved(self.count)


@dataclass(frozen=True, eq=False)
class CancelById:
    """Cancel the open streams with this request id, and answer how many there were."""

    channel: Channel
    request_id: str

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_cancel(self.channel, self.request_id)


@dataclass(frozen=True, eq=False)
class PoolMapRequested:
    """Answer with the next pool map from the engine."""

    channel: Channel
    arrived: float  # time.monotonic()

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_pool_map_request(self.channel, self.arrived)


@dataclass(frozen=True, eq=False)
class ClientsPolled:
    """A round of the cancellation poller found something."""

    result: PollResult[Stream]

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_clients_polled(self.result)


class Stop:
    """End the thread after the messages before this one."""

    def dispatch(self, handler: MessageHandler) -> None:
        handler.on_stop()
