"""Conversations that the server remembers between requests, under Triton's own sequence ids.

A turn sends only its new text; what came before is kept here, as tokens or as messages. Its keys and values are kept
by the scheduler, which pins their blocks (pins.py); where it had to let them go, they are computed again.

Messages are kept as JSON and tokens as an array, so that what a session takes is known: parsed, a message may take 20
times as much.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument

Message = dict[str, Any]


class SessionName(NamedTuple):
    """Sequences of different salts are different: knowing another tenant's id opens nothing."""

    salt: str
    sequence_id: int | str


@dataclass(eq=False)
class Session:
    """What has been said. One of `tokens` and `messages` is None: a conversation stays with what it began with."""

    name: SessionName
    tokens: array[int] | None = None  # int32
    messages: list[bytes] | None = None  # lists of messages, as JSON, one after the other
    num_chars: int = 0  # of them
    busy: bool = False
    expires: float = 0.0
    counted: int = 0  # bytes, with those of the turn that is under way

    @property
    def nbytes(self) -> int:
        """What it keeps."""
        if self.tokens is not None:
            return len(self.tokens) * self.tokens.itemsize
        return sum(map(len, self.messages or ()))


@dataclass(eq=False)
class Turn:
    """One request of a session, which is its own until `finish` or `undo`."""

    sessions: Sessions
    session: Session
    is_first: bool
    is_last: bool
    replaced: Session | None = None  # what had the name before a start
    messages: list[bytes] = field(default_factory=list)  # the whole conversation, this turn's included, as a session's
    num_chars: int = 0  # of them
    is_over: bool = False

    @property
    def name(self) -> SessionName:
        return self.session.name

    def tokens_before(self) -> list[int]:
        """What the new text continues. Raises RequestError in a conversation of messages."""
        if self.session.messages is not None:
            raise invalid_argument("sequence_id", self.name.sequence_id, "was begun with messages; go on with messages")
        return list(self.session.tokens or ())

    def hold(self, num_tokens: int) -> None:
        """The prompt with what came before has so many tokens. Raises RequestError where there is no room for them."""
        if not self.messages:
            self.sessions.hold(self, num_tokens * array("i").itemsize)

    def conversation(self, messages: list[Message]) -> list[Message]:
        """All messages, with these new ones. Raises RequestError in a conversation of plain text, and where there is no
        room for them."""
        if self.session.tokens is not None:
            raise invalid_argument(
                "sequence_id", self.name.sequence_id, "was begun with text_input; go on with text_input"
            )
        before = self.session.messages or []
        self._say(before, self.session.num_chars, messages)
        self.sessions.hold(self, sum(map(len, self.messages)))
        return [*(message for said in before for message in json.loads(said)), *messages]

    def finish(self, tokens: list[int], text: str) -> None:
        """The turn was answered. tokens: everything so far, the answer included; text: the answer."""
        if self.messages:
            self._say(self.messages, self.num_chars, [{"role": "assistant", "content": text}])
            self.session.messages, self.session.num_chars = self.messages, self.num_chars
        else:
            self.session.tokens = array("i", tokens)
        self.sessions.close(self, forget=self.is_last)

    def undo(self) -> None:
        """The turn failed or was cancelled: as if it had never been sent."""
        self.sessions.close(self, forget=self.is_first, put_back=self.replaced)

    def _say(self, before: list[bytes], num_chars: int, messages: list[Message]) -> None:
        said = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
        self.messages, self.num_chars = [*before, said.encode()], num_chars + len(said)


class Sessions:
    """All sessions of a model instance. Safe to use from any thread.

    ttl: seconds without a turn after which a session is forgotten; most: how many there may be; unpin: called for
    each that ends, so that its blocks are let go of; most_mib: what all of them may keep of what was said, the answers
    that are under way not counted; most_of_tenant: sessions of one salt, 0: as many as like.
    """

    def __init__(
        self,
        ttl: float,
        most: int,
        unpin: Callable[[SessionName], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        max_mib: int = 256,
        max_per_tenant: int = 0,
    ):
        self._ttl = ttl
        self._most = most
        self._most_mib = max_mib
        self._most_of_tenant = max_per_tenant
        self._counted = 0  # bytes of all sessions, those that a start may put back among them
        self._unpin = unpin
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionName, Session] = OrderedDict()  # in the order in which they expire

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, name: SessionName, *, start: bool, end: bool) -> Turn:
        """Raises RequestError for a session that is unknown or has expired, that is in the middle of a turn, or that
        would be one too many."""
        self.expire()
        with self._lock:
            session = self._sessions.get(name)
            if session and session.busy:
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"sequence_id={name.sequence_id!r}: its last turn is not answered yet; wait for it, or cancel it",
                )
            replaced = session if start else None
            if start:
                if session is None:
                    self._check_place(name)
                if session is not None:
                    self._unpin(name)  # a start begins anew, as everywhere in Triton
                session = self._sessions[name] = Session(name)
            elif session is None:
                raise invalid_argument(
                    "sequence_id",
                    name.sequence_id,
                    f"no such session: never begun, ended, or expired after session_ttl={self._ttl:g} seconds; send"
                    " sequence_start",
                )
            session.busy = True
            return Turn(self, session, is_first=start, is_last=end, replaced=replaced)

    def _check_place(self, name: SessionName) -> None:
        """Raises RequestError where there is none for one more."""
        full, most = "", self._most_of_tenant
        if len(self._sessions) >= self._most:
            full = f"max_sessions={self._most} are open"
        elif most and sum(one.salt == name.salt for one in self._sessions) >= most:
            full = f"max_tenant_sessions={most} of this cache_salt are open"
        if full:
            reason = f"sequence_id={name.sequence_id!r}: {full}; end one, or wait for one to expire"
            raise RequestError(ErrorCode.UNAVAILABLE, reason)

    def hold(self, turn: Turn, nbytes: int) -> None:
        """With this turn its session keeps so many bytes, if it stays. Raises RequestError where there is no room."""
        with self._lock:
            if turn.is_last or turn.is_over:  # as its prompt was tokenized
                return
            if self._counted - turn.session.counted + nbytes > self._most_mib << 20:
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"sequence_id={turn.name.sequence_id!r}: its {nbytes} bytes are more than the other sessions leave"
                    f" of max_sessions_mib={self._most_mib}; end one, or wait for one to expire",
                )
            self._count(turn.session, nbytes)

    def _count(self, session: Session, nbytes: int) -> None:
        self._counted += nbytes - session.counted
        session.counted = nbytes

    def close(self, turn: Turn, *, forget: bool, put_back: Session | None = None) -> None:
        with self._lock:
            turn.is_over = True
            session = put_back or turn.session
            session.busy = False
            session.expires = self._clock() + self._ttl
            if put_back:
                self._sessions[turn.name] = put_back
            if forget and not put_back:
                del self._sessions[turn.name]
            else:
                self._sessions.move_to_end(turn.name)
            self._count(turn.session, 0 if forget else turn.session.nbytes)
            if turn.replaced and not put_back:
                self._count(turn.replaced, 0)
        if forget:
            self._unpin(turn.name)

    def expire(self) -> None:
        """Forget those whose time is over."""
        over = []
        with self._lock:
            while (idle := self._first_idle()) and idle.expires <= self._clock():
                over.append(idle.name)
                self._count(idle, 0)
                del self._sessions[idle.name]
        for name in over:
            self._unpin(name)

    def seconds_left(self) -> float | None:
        """Until the next one expires; None where nothing is to expire."""
        with self._lock:
            idle = self._first_idle()
        return None if idle is None else idle.expires - self._clock()

    def _first_idle(self) -> Session | None:
        return next((one for one in self._sessions.values() if not one.busy), None)
