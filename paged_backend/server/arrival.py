"""A request between admission checks and the encoding of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.trace import RequestTrace
from paged_backend.server.channel import Channel
from paged_backend.server.prompts import Earlier, Prompt
from paged_backend.server.sessions import Turn
from paged_backend.server.wire.call import Call


@dataclass(frozen=True, eq=False)
class Arrival:
    """A request that passed the admission checks and whose prompt is still to be encoded."""

    key: int  # the engine's name for the request, unique
    call: Call
    channel: Channel
    arrived: float  # time.monotonic()
    sampling: SamplingParams
    turn: Turn | None
    trace: RequestTrace | None = None  # None: not traced

    @property
    def num_chars(self) -> int:
        """Characters of the text, or of the conversation as JSON."""
        return self.call.num_chars + (self.turn.session.num_chars if self.turn else 0)

    def prompt(self) -> Prompt:
        """Return what is to be encoded. Raises RequestError if the session has a prompt of another kind."""
        earlier = self.turn.earlier(chat=self.call.is_chat) if self.turn else Earlier()
        return Prompt(self.call, self.sampling, earlier)
