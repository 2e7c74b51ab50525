"""Connections between rank 0 and each other rank, which tell each side when the other has ended, and why.

gloo reports a broken connection only to a rank that waits for a message. These connections are watched all the time, so
the end of a rank is noticed between steps, too, and a rank can say why it ends.

Both sides prove that they know the engine's secret, which is never sent. Each chooses a nonce, 32 random bytes:

    rank 0 -> rank    nonce
    rank -> rank 0    rank, nonce, HMAC("rank", rank, both nonces)
    rank 0 -> rank    HMAC("start", rank, both nonces, start), length of start, start: what the rank needs to begin
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import NamedTuple

from paged_backend.distributed.keep_alive import keep_alive
from paged_backend.utils.accepting import connections

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.2
HELLO_SECONDS = 10  # time for a connection to prove that it knows the secret
MAX_STRANGERS = 256  # connections that have not proved it yet; beyond that, the oldest is closed
NONCE_BYTES = 32
_HELLO = struct.Struct("<I32s32s")
_START = struct.Struct("<32sI")
START_LIMIT = 64 << 20


class Meeting(NamedTuple):
    """How the other ranks reach rank 0."""

    host: str
    port: int


class LinkListener:
    """Accepts the connections of the other ranks."""

    def __init__(self, host: str, secret: bytes, start: bytes):
        """secret: known to all ranks. start: sent to each rank that knows the secret."""
        self._secret, self._start = secret, start
        self._socket = socket.create_server((host, 0), backlog=64)
        self.meeting = Meeting(host, self._socket.getsockname()[1])
        self._arrived: SimpleQueue[tuple[int, Connection]] = SimpleQueue()
        self._places: dict[int, str] = {}  # the addresses of the ranks that have arrived
        self._strangers: deque[socket.socket] = deque()
        self._lock = threading.Lock()  # guards `_strangers` and `_places`
        threading.Thread(target=self._listen, name="links", daemon=True).start()

    def accept(self, count: int, waiting: Callable[[dict[int, Connection]], None]) -> dict[int, Connection]:
        """Return the connections of `count` ranks, by rank. waiting: called between attempts with the connections found
        so far; raises an error to give up."""
        links: dict[int, Connection] = {}
        while len(links) < count:
            waiting(links)
            try:
                rank, link = self._arrived.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            links[rank] = link
        return links

    def close(self) -> None:
        """Accept no further connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _listen(self) -> None:
        for accepted, (address, *_) in connections(self._socket):
            with self._lock:
                self._strangers.append(accepted)
                if len(self._strangers) > MAX_STRANGERS:
                    with suppress(OSError):
                        self._strangers.popleft().shutdown(socket.SHUT_RDWR)  # ends its thread
            # A thread each, because a stranger may send nothing.
            threading.Thread(target=self._meet, args=(accepted, address), name="link", daemon=True).start()

    def _meet(self, accepted: socket.socket, address: str) -> None:
        try:
            try:
                rank = self._rank(accepted)
            finally:
                with self._lock, suppress(ValueError):  # not there if it was closed
                    self._strangers.remove(accepted)
            keep_alive(accepted)
        except OSError as error:
            accepted.close()
            log.warning("refused a connection from %s to the ranks: %s", address, error or "it has ended")
        else:
            self._admit(rank, address, _link(accepted))

    def _admit(self, rank: int, address: str, link: Connection) -> None:
        """Hand the first connection of a rank to `accept`. Refuse any other here, since `accept` may have returned."""
        with self._lock:
            if (place := self._places.get(rank)) is None:
                self._places[rank] = address
        if place is None:
            self._arrived.put((rank, link))
            return
        reason = f"rank {rank} has joined from {place} already; {address} is refused"
        log.warning(reason)
        with suppress(OSError):
            link.send_bytes(reason.encode())
        link.close()

    def _rank(self, accepted: socket.socket) -> int:
        """Return the rank that a connection introduces. Raises OSError if it does not know the secret."""
        deadline = time.monotonic() + HELLO_SECONDS
        accepted.settimeout(HELLO_SECONDS)
        accepted.sendall(own := secrets.token_bytes(NONCE_BYTES))
        rank, other, proof = _HELLO.unpack(_receive(accepted, _HELLO.size, deadline))
        if not hmac.compare_digest(proof, _proof(self._secret, b"rank", rank, own + other)):
            raise ConnectionRefusedError("it does not know the secret of the ranks")
        proof = _proof(self._secret, b"start", rank, own + other + self._start)
        accepted.sendall(_START.pack(proof, len(self._start)) + self._start)
        return int(rank)


def hang_up(link: Connection) -> None:
    """End a connection that another thread may be waiting for. That thread and the other side then find it closed.
    `close` would leave the waiting thread with a file descriptor that may be reused for something else."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def connect(meeting: Meeting, secret: bytes, rank: int, seconds: float) -> tuple[Connection, bytes]:
    """Connect a rank to rank 0. Return the connection, and what the rank needs to begin. Raises OSError if rank 0
    cannot be reached within this time, or has another secret."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((meeting.host, meeting.port), timeout=max(1.0, seconds))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    try:
        keep_alive(connection)
        deadline = time.monotonic() + max(1.0, seconds)
        other, own = _receive(connection, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(_HELLO.pack(rank, own, _proof(secret, b"rank", rank, other + own)))
        try:
            proof, length = _START.unpack(_receive(connection, _START.size, deadline))
        except EndOfConnection:
            raise ConnectionRefusedError("rank 0 has refused this rank: their secrets differ") from None
        start = _receive(connection, min(length, START_LIMIT), deadline)
        if not hmac.compare_digest(proof, _proof(secret, b"start", rank, other + own + start)):
            raise ConnectionRefusedError(f"what listens at {meeting.host}:{meeting.port} does not know the secret")
    except OSError:
        connection.close()
        raise
    return _link(connection), start


class EndOfConnection(ConnectionError):
    """The other side has closed the connection."""


def _proof(secret: bytes, side: bytes, rank: int, message: bytes) -> bytes:
    return hmac.digest(secret, side + rank.to_bytes(4, "little") + message, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return `size` bytes. Raises OSError if they do not arrive by the deadline (time.monotonic())."""
    parts = []
    while size:
        if (left := deadline - time.monotonic()) <= 0:  # a limit for each part would let a slow peer go on for hours
            raise TimeoutError("it is too slow")
        connection.settimeout(left)
        if not (part := connection.recv(min(size, 1 << 20))):
            raise EndOfConnection("it has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _link(connection: socket.socket) -> Connection:
    connection.settimeout(None)
    return Connection(connection.detach())
