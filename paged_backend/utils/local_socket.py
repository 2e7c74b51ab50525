"""The local socket of an engine: for other models of the same tritonserver, each of which is its own process, and for
`paged profile`, `paged sleep` and `paged wake`.

It is a Unix domain socket in a directory that only this user can access, and carries JSON frames. A frame with
"attached": N is followed by N bytes; the receiver gets them as its value "attached".

Frames to the engine:   {"id": 7, "request": {"tensors": {name: [values]}, "parameters": ..., "timeout_us": ...}}
                        {"id": 7, "profile": seconds}, {"id": 7, "sleep": seconds to wait for open requests},
                        {"id": 7, "wake": true}, {"id": 7, "describe": true}
                        {"id": 7, "cancel": true}, or {"id": 7, "stop": true}, which keeps the output so far
Frames from the engine: {"id": 7, "outputs": {name: [values]}, "final": false}
                        {"id": 7, "profile": {...}}, see server/profiler.py
                        {"id": 7, "describe": {...}}, see server/connections/migration.py
                        {"id": 7, "sleep": {"changed": true, "seconds": ..., "bytes": {"pool": ..., "weights": ...,
                        "graphs": ...}}}, before it {"id": 7, "open": number of open requests}; "wake" likewise
                        {"id": 7, "error": {"code": "UNAVAILABLE", "text": ...}}, which is final; with
                        "can_retry": true in it another instance may run the request
                        {"unloading": true}: open requests continue, new ones are rejected
                        {"refused": "…"}: why the connection was closed at once

Instances of a model move requests to each other with the frames of engine/remote_engine.py.

The sender of a request chooses its id, unique on the connection. Each frame is preceded by its length as a 4-byte
big-endian integer. server/wire/tensors.py defines the types of tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

DEFAULT_FRAME_BYTES = 64 << 20
LONGEST_PROFILE = 60.0  # seconds
SEND_SECONDS = 5.0  # the longest that sending a frame may block
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class FrameError(ValueError):
    """A frame is malformed or too large."""


class Connection:
    """Sends and receives frames. Many threads may send; one reads."""

    def __init__(self, end: socket.socket, max_frame_bytes: int = DEFAULT_FRAME_BYTES):
        self.max_frame_bytes = max_frame_bytes
        self._socket = end
        seconds, rest = divmod(SEND_SECONDS, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(1e6 * rest)))
        self._lock = threading.Lock()

    def send(self, frame: bytes, attached: Iterable[memoryview] = ()) -> None:
        """Send a frame, and the bytes that it says are attached. Raises OSError, and closes the connection, if its peer
        has ended or blocks for SEND_SECONDS."""
        with self._lock:
            try:
                self._socket.sendall(frame)
                for part in attached:
                    self._socket.sendall(part)
            except OSError:
                self.close()  # the peer may have received part of the frame
                raise

    def frames(self) -> Generator[dict[str, Any], None, None]:
        """Yield received frames until the connection ends. Raises FrameError or OSError."""
        with self._socket, self._socket.makefile("rb", buffering=_READ_BYTES) as file:
            while len(head := file.read(_LENGTH.size) or b"") == _LENGTH.size:  # None: a receive timeout has passed
                (length,) = _LENGTH.unpack(head)
                if length > self.max_frame_bytes:
                    raise FrameError(_too_long(length, self.max_frame_bytes, "received"))
                if len(body := file.read(length) or b"") < length:
                    return
                frame = _unpack(body)
                if "attached" in frame:
                    count = self._attached(frame["attached"])
                    if len(attached := file.read(count) or b"") < count:
                        return
                    frame["attached"] = attached
                yield frame

    def _attached(self, count: Any) -> int:
        if type(count) is not int or count < 0:
            raise FrameError(f"attached={count!r}: must be a number of bytes")
        if count > self.max_frame_bytes:
            raise FrameError(_too_long(count, self.max_frame_bytes, "received"))
        return count

    def close(self) -> None:
        """End the connection for both sides and all threads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def pack(frame: Mapping[str, Any], max_frame_bytes: int = DEFAULT_FRAME_BYTES) -> bytes:
    """Return a frame as bytes. Raises FrameError if it is too large."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > max_frame_bytes:
        raise FrameError(_too_long(len(body), max_frame_bytes, "sent"))
    return _LENGTH.pack(len(body)) + body


def _too_long(length: int, limit: int, direction: str) -> str:
    return f"a frame of {length} bytes; at most {limit} can be {direction} (max_frame_bytes)"


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not valid JSON: {error}") from None
    if not isinstance(frame, dict):
        raise FrameError("not a JSON object")
    return frame


# --- socket files ----------------------------------------------------------------------------------------------------
# A socket's name identifies the server's process, the model and the instance. Paths go through the directory's file
# descriptor: the directory that was checked is the one that is used, and no path is too long for a socket.


@contextmanager
def _directory() -> Iterator[int]:
    """Open the directory, creating it if needed. Raises PermissionError if other users can access it."""
    path = os.path.join(tempfile.gettempdir(), f"paged-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path}: must belong to user {os.getuid()}, with the mode 0700, for its sockets")
        yield opened
    finally:
        os.close(opened)


def _prefix(model: str, server: int) -> str:
    return f"{server}-{_digest(model)}-"


def _digest(model: str) -> str:
    return hashlib.sha256(model.encode()).hexdigest()[:16]


def listen(model: str) -> tuple[socket.socket, str]:
    """Return a listening socket for an instance of this model, and its name. Raises OSError.

    Sockets of processes that have ended are removed.
    """
    name = f"{_prefix(model, os.getppid())}{secrets.token_hex(4)}.sock"
    with _directory() as directory:
        _clean(directory)
        end = socket.socket(socket.AF_UNIX)
        try:
            end.bind(_path(directory, f"{name}.new"))
            end.listen()
            os.rename(f"{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory)  # found only once it listens
        except OSError:
            end.close()
            raise
    return end, name


def remove(name: str) -> None:
    """Remove a socket, so that no new connection finds it."""
    with suppress(OSError), _directory() as directory:
        os.unlink(name, dir_fd=directory)


def servers(model: str) -> list[int]:
    """Return the process ids of this user's servers that serve this model. Raises OSError."""
    with _directory() as directory:
        _clean(directory)
        parts = (name.removesuffix(".sock").split("-") for name in os.listdir(directory) if name.endswith(".sock"))
        return sorted({int(server) for server, digest, _ in parts if digest == _digest(model)})


def find(model: str, server: int | None = None) -> list[str]:
    """Return the names of the sockets of this model's instances. Raises OSError.

    server: process id of the server; by default this process is one of its models.
    """
    prefix = _prefix(model, os.getppid() if server is None else server)
    with _directory() as directory:
        return [name for name in os.listdir(directory) if name.startswith(prefix) and name.endswith(".sock")]


def connect(name: str) -> socket.socket:
    """Return a connection to the socket of this name. Raises OSError."""
    with _directory() as directory:
        return _connect(directory, name)


def is_own(end: socket.socket) -> bool:
    """Return whether the peer is a process of the same user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user == os.getuid()


def _clean(directory: int) -> None:
    for name in os.listdir(directory):
        if name.endswith(".sock"):
            try:
                _connect(directory, name).close()
            except ConnectionRefusedError:  # its process has ended
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            except OSError:
                continue


def _connect(directory: int, name: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(_path(directory, name))
    except OSError:
        end.close()
        raise
    return end


def _path(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"
