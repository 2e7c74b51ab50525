"""The temporary files of a server: a folder, and shared memory."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"paged-server-(\d+_[0-9a-f]{8})")
_SHARED_MEMORY = Path("/dev/shm")


class Scratch:
    """A folder that only this user can read, and a prefix for names in shared memory, both for one server.

    The folder is locked while this process lives. A folder without a lock is left from a process that was killed.
    """

    def __init__(self) -> None:
        """Choose the names; `create` makes the folder."""
        self._token = f"{os.getpid()}_{secrets.token_hex(4)}"
        self._lock: int | None = None
        self.path = Path(tempfile.gettempdir(), f"paged-server-{self._token}")

    @property
    def shm_prefix(self) -> str:
        return _shm_prefix(self._token)

    def create(self) -> None:
        """Make the folder. Also removes folders that killed processes of this user have left. Raises OSError."""
        for folder in self.path.parent.glob("paged-server-*"):
            with suppress(OSError):  # its process lives, or it belongs to another user
                _remove_abandoned(folder)
        while self._lock is None:
            self.path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # another process has removed it before it was locked
                self._lock = _locked(self.path, wait=True)

    def remove(self) -> None:
        """Remove the folder and the shared memory. Does nothing if there is none."""
        _remove(self.path, self._token)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _shm_prefix(token: str) -> str:
    return f"paged_{token}_"


def _remove_abandoned(folder: Path) -> None:
    match = _NAME.fullmatch(folder.name)
    if match and folder.lstat().st_uid == os.getuid():
        lock = _locked(folder, wait=False)
        _remove(folder, match[1])
        os.close(lock)


def _remove(folder: Path, token: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for region in _SHARED_MEMORY.glob(f"{_shm_prefix(token)}*"):
        with suppress(OSError):
            region.unlink()


def _locked(folder: Path, *, wait: bool) -> int:
    """Return a handle with a lock of a folder that exists. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except BaseException:
        os.close(handle)
        raise
    return handle
