"""Sessions: conversations that the server remembers between requests, identified by Triton's sequence ids.

A turn sends only its new text. The text before it is kept here, as token ids or as messages; its KV cache blocks are
pinned by the scheduler (`Pins` in kv/blocks.py), and recomputed if they had to be evicted.

Messages are stored as JSON bytes and tokens as an array, so that their size is known: parsed messages may take 20 times
as much memory.

When a limit of all sessions is reached, a tenant with less takes room from the tenant with the most: its oldest idle
sessions are forgotten. So other tenants can open sessions although many are idle.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.server.prompts.encoder import Earlier, EncodedPrompt, messages_text


class SessionName(NamedTuple):
    """Identifies a session. A tenant cannot open another tenant's session: the salts differ."""

    salt: str
    sequence_id: int | str


@dataclass(eq=False)
class Session:
    """The text of a session so far, either as `tokens` or as `messages`: a session cannot mix both."""

    name: SessionName
    tokens: array[int] | None = None  # int32
    messages: list[bytes] | None = None  # JSON lists of messages, in order
    num_chars: int = 0  # length of `messages`
    busy: bool = False  # whether a turn is in progress
    expires: float = 0.0
    counted: int = 0  # bytes counted against the limit, including a turn in progress

    @property
    def nbytes(self) -> int:
        """Bytes of the stored text."""
        if self.tokens is not None:
            return len(self.tokens) * self.tokens.itemsize
        return sum(map(len, self.messages or ()))


@dataclass(eq=False)
class Turn:
    """One request of a session. No other turn can begin until `finish` or `undo` is called."""

    sessions: Sessions
    session: Session
    is_first: bool
    is_last: bool
    replaced: Session | None = None  # the session of this name before sequence_start
    messages: list[bytes] = field(default_factory=list)  # the conversation including this turn, as in Session
    num_chars: int = 0  # length of `messages`
    is_over: bool = False

    @property
    def name(self) -> SessionName:
        return self.session.name

    def earlier(self, *, chat: bool) -> Earlier:
        """Return the text before this turn. chat: whether this turn has messages. Raises RequestError if the earlier
        turns are of the other kind."""
        session = self.session
        if (session.tokens if chat else session.messages) is not None:
            begun = "text_input" if chat else "messages"
            reason = f"was begun with {begun}; continue with {begun}"
            raise invalid_argument("sequence_id", self.name.sequence_id, reason)
        return Earlier(session.tokens or (), session.messages or (), session.num_chars)

    def add_prompt(self, prompt: EncodedPrompt) -> None:
        """Count the turn's prompt, and keep its messages. Raises RequestError beyond the limit."""
        if prompt.messages is None:
            nbytes = len(prompt.tokens) * array("i").itemsize
        else:
            self._append(self.session.messages or [], self.session.num_chars, prompt.messages)
            nbytes = sum(map(len, self.messages))
        self.sessions.reserve(self, nbytes)

    def finish(self, tokens: list[int], answer: Mapping[str, Any]) -> None:
        """Store the turn. tokens: all token ids so far, including the output. answer: fields of the output's
        message."""
        if self.messages:
            self._append(self.messages, self.num_chars, messages_text([{"role": "assistant", **answer}]))
            self.session.messages, self.session.num_chars = self.messages, self.num_chars
        else:
            self.session.tokens = array("i", tokens)
        self.sessions.close(self, forget=self.is_last)

    def undo(self) -> None:
        """Restore the session to its state before the turn, which failed or was cancelled."""
        self.sessions.close(self, forget=self.is_first, put_back=self.replaced)

    def _append(self, earlier: list[bytes], num_chars: int, messages: str) -> None:
        self.messages, self.num_chars = [*earlier, messages.encode()], num_chars + len(messages)


class Sessions:
    """The sessions of one model instance. Thread-safe.

    count: number of open sessions. next_expiry: when the next session expires; infinite if none will.
    """

    def __init__(
        self,
        ttl: float,
        max_sessions: int,
        unpin: Callable[[SessionName], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        max_mib: int = 256,
        max_per_tenant: int = 0,
    ):
        """ttl: seconds after the last turn until a session expires.
        unpin: called for each session that ends, to release its blocks.
        max_mib: limit of the stored text of all sessions, without outputs in progress.
        max_per_tenant: maximum number of sessions with the same salt; 0: unlimited."""
        self._ttl = ttl
        self._max_sessions = max_sessions
        self._max_mib = max_mib
        self._max_per_tenant = max_per_tenant
        self._counted = 0  # bytes of all sessions, including replaced ones that may be put back
        self._unpin = unpin
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionName, Session] = OrderedDict()  # sessions in order of expiry
        self.count = 0
        self.next_expiry = math.inf

    def begin(self, name: SessionName, *, start: bool, end: bool) -> Turn:
        """Begin a turn of a session, which `start` creates.

        Raises RequestError if the session is unknown or has expired, if a turn is in progress, or if there are too many
        sessions.
        """
        self.expire()
        with self._changing():
            session = self._sessions.get(name)
            if session and session.busy:
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"sequence_id={name.sequence_id!r}: its previous turn is still running; wait for it or cancel it",
                )
            replaced = session if start else None
            if start:
                if session is None:
                    self._check_tenant(name)
                    if not self._make_room(name.salt, 1, self._room, lambda session: 1):
                        raise self._full(name, f"max_sessions={self._max_sessions} are open")
                else:
                    self._unpin(name)  # sequence_start replaces an existing sequence, as in Triton
                session = self._sessions[name] = Session(name)
            elif session is None:
                raise invalid_argument(
                    "sequence_id",
                    name.sequence_id,
                    f"no such session: never begun, ended, expired after session_ttl={self._ttl:g} seconds, or removed"
                    " to make room for another cache_salt; send sequence_start",
                )
            session.busy = True
            return Turn(self, session, is_first=start, is_last=end, replaced=replaced)

    def _check_tenant(self, name: SessionName) -> None:
        """Raise RequestError if the tenant can have no further session."""
        limit = self._max_per_tenant
        if limit and sum(other.salt == name.salt for other in self._sessions) >= limit:
            raise self._full(name, f"max_tenant_sessions={limit} of this cache_salt are open")

    def _full(self, name: SessionName, reason: str) -> RequestError:
        text = f"sequence_id={name.sequence_id!r}: {reason}; end one, or wait for one to expire"
        return RequestError(ErrorCode.UNAVAILABLE, text)

    def _room(self) -> int:
        return self._max_sessions - len(self._sessions)

    def _make_room(self, salt: str, needed: int, room: Callable[[], int], size: Callable[[Session], int]) -> bool:
        """Forget idle sessions of other tenants until `room()` is at least `needed`. Return whether it is.

        The tenant that has the most loses its oldest session, as long as it has more than `salt` gets. size: what a
        session contributes.
        """
        if room() >= needed:
            return True
        used: Counter[str] = Counter()
        idle: dict[str, deque[Session]] = {}  # in order of expiry
        for session in self._sessions.values():
            used[session.name.salt] += size(session)
            if not session.busy and session.name.salt != salt:
                idle.setdefault(session.name.salt, deque()).append(session)
        while room() < needed and idle:
            greediest = max(idle, key=used.__getitem__)
            if used[greediest] <= used[salt] + needed:
                return False
            oldest = idle[greediest].popleft()
            used[greediest] -= size(oldest)
            if not idle[greediest]:
                del idle[greediest]
            self._count(oldest, 0)
            del self._sessions[oldest.name]
            self._unpin(oldest.name)
        return room() >= needed

    def reserve(self, turn: Turn, nbytes: int) -> None:
        """Count this many bytes for the turn's session. Raises RequestError if that exceeds `max_mib`."""
        with self._changing():
            if turn.is_last or turn.is_over:  # a turn may end while its prompt is tokenized
                return
            more = nbytes - turn.session.counted
            salt, room = turn.name.salt, lambda: (self._max_mib << 20) - self._counted
            if not self._make_room(salt, more, room, lambda session: session.counted):
                raise RequestError(
                    ErrorCode.UNAVAILABLE,
                    f"sequence_id={turn.name.sequence_id!r}: its {nbytes} bytes are more than the other sessions leave"
                    f" of max_sessions_mib={self._max_mib}; end one, or wait for one to expire",
                )
            self._count(turn.session, nbytes)

    def _count(self, session: Session, nbytes: int) -> None:
        self._counted += nbytes - session.counted
        session.counted = nbytes

    def close(self, turn: Turn, *, forget: bool, put_back: Session | None = None) -> None:
        """End a turn.

        forget: remove the session.
        put_back: the session to restore, which this turn had replaced with sequence_start.
        """
        with self._changing():
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
        """Remove the sessions that have expired."""
        expired = []
        with self._changing():
            while (idle := self._first_idle()) and idle.expires <= self._clock():
                expired.append(idle.name)
                self._count(idle, 0)
                del self._sessions[idle.name]
        for name in expired:
            self._unpin(name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and then update what can be read without it."""
        with self._lock:
            try:
                yield
            finally:
                idle = self._first_idle()
                self.count, self.next_expiry = len(self._sessions), idle.expires if idle else math.inf

    def _first_idle(self) -> Session | None:
        return next((session for session in self._sessions.values() if not session.busy), None)
