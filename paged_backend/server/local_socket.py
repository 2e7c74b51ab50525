"""How other models of the same tritonserver, each a process of its own, reach an engine: a Unix domain socket in a
directory that is this user's alone, and JSON frames on it.

Frames to the engine:   {"id": 7, "request": {"tensors": {name: [values]}, "parameters": ..., "timeout_us": ...}}
                        {"id": 7, "cancel": true}, or {"id": 7, "stop": true}, which ends it with what there is
Frames from the engine: {"id": 7, "outputs": {name: [values]}, "final": false}
                        {"id": 7, "error": {"code": "UNAVAILABLE", "text": ...}}, which is final; with
                        "not_begun": true in it, the engine leaves, and another instance may take the request
                        {"leaving": true}: what is open goes on, and nothing new is let in
                        {"refused": "…"}: why the connection ends before anything was asked

The sender of a request makes its id, which is of the connection. Each frame comes after its length, 4 bytes, the
highest first. Types of tensors are those of tensors.py.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from paged_backend.api.limits import InputLimits
from paged_backend.server.tensors import NUMPY_TYPES, TensorSpec

SEND_SECONDS = 5.0  # that a frame may wait for its reader
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class FrameError(ValueError):
    """What came, or was to go, is no frame."""


class Connection:
    """Frames both ways. Many threads may send, one reads."""

    def __init__(self, end: socket.socket, max_frame_bytes: int = InputLimits.max_frame_bytes):
        self.max_frame_bytes = max_frame_bytes
        self._socket = end
        seconds, rest = divmod(SEND_SECONDS, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(1e6 * rest)))
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Raises OSError where the other side is gone, or has not read for SEND_SECONDS. None goes out after that."""
        with self._lock:
            try:
                self._socket.sendall(frame)
            except OSError:
                self.close()  # a part of it may have gone out
                raise

    def frames(self) -> Iterator[dict[str, Any]]:
        """What comes, until the connection ends. Raises FrameError, or OSError."""
        with self._socket, self._socket.makefile("rb", buffering=_READ_BYTES) as file:
            while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
                (length,) = _LENGTH.unpack(head)
                if length > self.max_frame_bytes:
                    raise FrameError(_too_long(length, self.max_frame_bytes, "come"))
                if len(body := file.read(length)) < length:
                    return
                yield _unpack(body)

    def close(self) -> None:
        """End it, for both sides and all threads."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def pack(frame: Mapping[str, Any], max_frame_bytes: int = InputLimits.max_frame_bytes) -> bytes:
    """Raises FrameError for one that is too large."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > max_frame_bytes:
        raise FrameError(_too_long(len(body), max_frame_bytes, "go"))
    return _LENGTH.pack(len(body)) + body


def _too_long(length: int, most: int, way: str) -> str:
    return f"a frame of {length} bytes; at most {most} may {way} (max_frame_bytes)"


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not valid JSON: {error}") from None
    if not isinstance(frame, dict):
        raise FrameError("not a JSON object")
    return frame


def write_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Bytes that are no UTF-8 survive as halves of characters."""
    return {
        name: [_text(one) for one in values.tolist()] if values.dtype == np.object_ else values.tolist()
        for name, values in tensors.items()
    }


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def read_tensors(values: Any, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
    """One-dimensional ones, of the types of `specs`. Raises FrameError."""
    try:
        return {name: _tensor(each, specs[name]) for name, each in values.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"no tensors: {type(error).__name__}: {error}") from None


def _tensor(values: list[Any], spec: TensorSpec) -> np.ndarray:
    if spec.data_type == "TYPE_STRING":
        values = [one.encode(errors="surrogateescape") for one in values]
    tensor = np.array(values, NUMPY_TYPES[spec.data_type])
    if tensor.ndim != 1:
        raise FrameError(f"a tensor has {tensor.ndim} dimensions; must have 1")
    return tensor


# --- where sockets are -----------------------------------------------------------------------------------------------
# A socket's name is that of the server's process, of the model, and of the instance. Paths go through the directory's
# descriptor: what has been checked is what is used, and a path is never too long for a socket.


@contextmanager
def _directory() -> Iterator[int]:
    """A descriptor of the directory, which is made where it is missing. Raises PermissionError where others have a
    hand in it."""
    path = os.path.join(tempfile.gettempdir(), f"paged-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(opened)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path}: must belong to user {os.getuid()}, with the mode 0700, for its sockets")
        yield opened
    finally:
        os.close(opened)


def _prefix(model: str) -> str:
    return f"{os.getppid()}-{hashlib.sha256(model.encode()).hexdigest()[:16]}-"


def listen(model: str) -> tuple[socket.socket, str]:
    """A listening socket of an instance of this model, and its name. Takes away those of engines that are gone. Raises
    OSError."""
    name = f"{_prefix(model)}{secrets.token_hex(4)}.sock"
    with _directory() as directory:
        _clean(directory)
        end = socket.socket(socket.AF_UNIX)
        try:
            end.bind(_path(directory, f"{name}.new"))
            end.listen()
            os.rename(f"{name}.new", name, src_dir_fd=directory, dst_dir_fd=directory)  # found only where it listens
        except OSError:
            end.close()
            raise
    return end, name


def remove(name: str) -> None:
    with suppress(OSError), _directory() as directory:
        os.unlink(name, dir_fd=directory)


def find(model: str) -> list[str]:
    """The names of the sockets of this model's instances, in this server. Raises OSError."""
    prefix = _prefix(model)
    with _directory() as directory:
        return [name for name in os.listdir(directory) if name.startswith(prefix) and name.endswith(".sock")]


def connect(name: str) -> socket.socket:
    """Raises OSError."""
    with _directory() as directory:
        return _connect(directory, name)


def is_own(end: socket.socket) -> bool:
    """Whether the other side is a process of the same user's."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user == os.getuid()


def _clean(directory: int) -> None:
    for name in os.listdir(directory):
        if name.endswith(".sock"):
            try:
                _connect(directory, name).close()
            except ConnectionRefusedError:  # nobody listens
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
