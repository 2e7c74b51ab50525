"""A request between admission checks and tokenization."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.trace import RequestTrace
from paged_backend.server.channel import Channel
from paged_backend.server.sessions import Turn
from paged_backend.server.wire.call import Call
from paged_backend.text.conversation import Message


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request that passed the admission checks and whose prompt is still to be tokenized."""

    key: int  # the engine's name for the request, unique
    call: Call
    channel: Channel
    arrived: float  # time.monotonic()
    sampling: SamplingParams
    turn: Turn | None
    messages: list[Message] | None = None  # the session's earlier messages, then the new ones; set by `read`
    trace: RequestTrace | None = None  # None: not traced

    @property
    def num_chars(self) -> int:
        """Characters of the text, or of the conversation as JSON."""
        return self.call.num_chars + (self.turn.session.num_chars if self.turn else 0)
