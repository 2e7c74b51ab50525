"""Connections between rank 0 and each other rank, which tell each side when the other has ended, and why.

gloo reports a broken connection only to a rank that waits for a message. These connections are watched all the time,
so that the end of a rank is noticed between steps, too, and a rank can say why it ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from paged_backend.distributed.keep_alive import keep_alive

log = logging.getLogger("paged_llm")

POLL_SECONDS = 0.2
HELLO_SECONDS = 10  # time for a process that has connected to say which rank it is


class Meeting(NamedTuple):
    """How the other ranks reach rank 0."""

    host: str
    port: int
    secret: str  # the first message of a rank contains it, which other programs do not know


class LinkListener:
    """Accepts the connections of the other ranks."""

    def __init__(self, host: str):
        self._socket = socket.create_server((host, 0), backlog=64)
        self._socket.settimeout(POLL_SECONDS)
        self.meeting = Meeting(host, self._socket.getsockname()[1], secrets.token_hex())

    def accept(self, count: int, waiting: Callable[[dict[int, Connection]], None]) -> dict[int, Connection]:
        """Return the connections of `count` ranks, by rank. waiting: called between attempts with those found so far;
        it raises an error to give up."""
        found: dict[int, Connection] = {}
        places: dict[int, str] = {}
        while len(found) < count:
            waiting(found)
            try:
                accepted, (address, *_) = self._socket.accept()
            except TimeoutError:
                continue
            accepted.settimeout(None)
            keep_alive(accepted)
            link = Connection(accepted.detach())
            rank = self._rank(link)
            if rank is not None and rank in found:
                reason = f"rank {rank} has joined from {places[rank]} already; {address} is refused"
                log.warning(reason)
                with suppress(OSError):
                    link.send_bytes(reason.encode())
            if rank is None or rank in found:
                link.close()
            else:
                places[rank] = address
                found[rank] = link
        return found

    def close(self) -> None:
        """Accept no further connections."""
        self._socket.close()

    def _rank(self, link: Connection) -> int | None:
        """Return the rank that a connection introduces; None if it is not one of ours."""
        try:
            rank, _, secret = link.recv_bytes(256).decode().partition(" ") if link.poll(HELLO_SECONDS) else ("", "", "")
        except (EOFError, OSError, UnicodeDecodeError):
            return None
        return int(rank) if rank.isdecimal() and secrets.compare_digest(secret, self.meeting.secret) else None


def hang_up(link: Connection) -> None:
    """End a connection while another thread may wait for it, which then finds that it is closed, as the other side
    does. `close` would leave that thread with a file descriptor that may be used for something else."""
    with suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def connect(meeting: Meeting, rank: int, seconds: float) -> Connection:
    """Connect a rank to rank 0. Raises OSError if rank 0 cannot be reached within this time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((meeting.host, meeting.port), timeout=max(1.0, seconds))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
    connection.settimeout(None)
    keep_alive(connection)
    link = Connection(connection.detach())
    link.send_bytes(f"{rank} {meeting.secret}".encode())
    return link
