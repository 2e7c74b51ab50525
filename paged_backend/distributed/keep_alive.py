"""Detects connections whose other machine is gone: a cut link sends nothing, so only the kernel's probes notice it."""

from __future__ import annotations

import socket

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
