"""Detects connections whose other machine is gone: a cut link sends nothing, so only the kernel's probes notice it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A peer that does not answer for IDLE + COUNT * INTERVAL seconds is gone. The peer's kernel answers, so a process that
# is busy or stopped is not taken for a machine that cannot be reached.
IDLE, INTERVAL, COUNT = 2, 1, 3
SECONDS = IDLE + COUNT * INTERVAL


def keep_alive(connection: socket.socket) -> None:
    """Make a TCP connection fail with ETIMEDOUT when its peer has not answered for SECONDS."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        (socket.TCP_KEEPIDLE, IDLE),
        (socket.TCP_KEEPINTVL, INTERVAL),
        (socket.TCP_KEEPCNT, COUNT),
        (socket.TCP_USER_TIMEOUT, 1000 * SECONDS),  # for data that is not acknowledged
    ):
        connection.setsockopt(socket.IPPROTO_TCP, name, value)


@contextmanager
def new_connections_kept_alive() -> Iterator[None]:
    """Apply `keep_alive` to every TCP connection that this process opens inside the context: those of gloo and of the
    TCPStore, which have no option for it."""
    before = _sockets().keys()
    yield
    for inode, descriptor in _sockets().items():
        if inode in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.getpeername()  # fails for a socket that listens
                keep_alive(connection)


def _sockets() -> dict[str, int]:
    """Return a descriptor of each socket of this process, by its inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if (target := os.readlink(entry)).startswith("socket:"):
                found[target] = int(entry.name)
    return found
