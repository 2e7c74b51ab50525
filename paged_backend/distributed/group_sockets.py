"""The sockets that torch.distributed opens for a process group, for which it has no options.

gloo and the TCPStore listen until the process ends, and keep every connection that a stranger opens and closes, until
the process has no file descriptors left. Therefore no connection is accepted once all ranks have met.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paged_backend.distributed.keep_alive import keep_alive

SO_ATTACH_FILTER = 26  # Linux
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # a BPF program: return 0, the bytes to keep of a packet


@contextmanager
def group_sockets(*, gloo: bool) -> Iterator[None]:
    """Context in which this process joins a group. Its new connections get `keep_alive`. gloo: whether it is a group of
    gloo, whose ports are closed at the end; NCCL's ports are also used later."""
    before = _sockets().keys()
    yield
    for inode, descriptor in _sockets().items():
        if inode in before:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.type != socket.SOCK_STREAM or opened.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                keep_alive(opened)
            elif gloo:
                close_port(opened)


def close_port(listening: socket.socket) -> None:
    """Make a listening socket accept no further connections, even if a library waits for them. Existing connections
    stay open. Raises OSError if the kernel has no socket filters."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    # Packets for the socket that listens are dropped. Closing it, or shutting it down, would disturb its library.
    listening.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_ALL) // 8, ctypes.addressof(program))
    )


def _sockets() -> dict[str, int]:
    """Return a descriptor of each socket of this process, by its inode."""
    descriptors = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if (target := os.readlink(entry)).startswith("socket:"):
                descriptors[target] = int(entry.name)
    return descriptors
