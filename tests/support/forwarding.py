"""A TCP port that forwards to another one, and can be closed like that of a machine that is lost."""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from typing import Any


class Forwarder(socketserver.ThreadingTCPServer):
    """Forwards a TCP port of this machine to another one, from its creation until `close`.

    Args:
        target: the port that it forwards to.
        port: its own port; 0 chooses a free one, which is `server_address[1]`.
    """

    allow_reuse_address, daemon_threads = True, True
    request_queue_size = 128

    def __init__(self, target: int, port: int = 0):
        super().__init__(("127.0.0.1", port), _Forward)
        self.target = target
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end all connections. May be called repeatedly."""
        self.shutdown()
        self.server_close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def answer(self, client: socket.socket, data: bytes) -> None:
        """Send what the target has sent to a client."""
        client.sendall(data)

    def __exit__(self, *raised: Any) -> None:
        self.close()


class _Forward(socketserver.BaseRequestHandler):
    server: Forwarder

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.target)) as target:
            ends = {self.request, target}
            self.server._open |= ends
            back = threading.Thread(target=self._copy, args=[target, self.request, self.server.answer], daemon=True)
            back.start()
            self._copy(self.request, target, socket.socket.sendall)
            back.join()
            self.server._open -= ends

    def _copy(self, source: socket.socket, target: socket.socket, send: Any) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                send(target, data)
            target.shutdown(socket.SHUT_WR)
