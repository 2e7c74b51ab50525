"""Accepts connections until a socket is closed."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger("paged_llm")

RETRY_SECONDS = 0.1
# The process or the machine has no room for a connection now, or the peer has left before it was accepted.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)


def connections(listener: socket.socket) -> Iterator[tuple[socket.socket, Any]]:
    """Yield each connection and the address of its peer until the socket is closed.

    Without free file descriptors, connections wait until some have been closed.
    """
    warned = False
    while True:
        try:
            accepted = listener.accept()
        except OSError as error:
            if error.errno not in _PASSING:  # closed
                return
            if not warned:
                log.warning("connections wait, since none can be accepted: %s", error.strerror)
                warned = True
            time.sleep(RETRY_SECONDS)
        else:
            warned = False
            yield accepted
