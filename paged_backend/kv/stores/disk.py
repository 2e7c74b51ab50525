"""The disk store of the prefix cache, which keeps prefixes across restarts of the server.

    directory/<fingerprint of model and layout>/<first two digits of the key>/<key>.safetensors    one file per block

`block_file.py` has the format. A file that does not read back exactly as it was written is never used: at the first
such file, or any other disk error, the store is disabled and the server continues without it. A missing file is not an
error: another server may have evicted it from a shared directory. The budget covers all files that were there at the
start, with any fingerprint, and all files that this server writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from paged_backend.kv.content import BlockKey
from paged_backend.kv.stores.block_file import BlockFormat, DiskStalled
from paged_backend.kv.stores.store import BlockStore
from paged_backend.utils.lru import LruIndex

log = logging.getLogger("paged_llm")

SUFFIX, PARTIAL = ".safetensors", ".part"
PARTIAL_SECONDS = 3600  # a partial file older than this is stale
NAME = re.compile(rf"[0-9a-f]+/[0-9a-f]{{2}}/[0-9a-f]{{64}}(-\d+)?{re.escape(SUFFIX)}")


class DiskStore(BlockStore):
    """Cached blocks on disk. The store stays disabled after an error."""

    def __init__(self, directory: Path, fingerprint: str, budget: int, block_format: BlockFormat):
        """budget: maximum bytes in the whole directory."""
        self._directory = directory
        self._fingerprint = fingerprint
        self._budget = budget
        self._format = block_format
        self._lock = threading.Lock()
        self._files: LruIndex[str, None] = LruIndex()  # with any fingerprint; changed with the lock
        self._num_blocks = self._read = self._written = 0
        super().__init__("disk")
        try:
            self._scan()
        except OSError as error:
            self._disable(f"cannot be used: {error}")

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the store, by name. Counters count since the start."""
        return {
            "disk_up": self._up,
            "disk_blocks": self._num_blocks,  # with this fingerprint
            "disk_read": self._read,  # blocks
            "disk_written": self._written,
            "disk_seconds": self.cost.seconds_per_block,
        }

    def should_write(self, key: BlockKey) -> bool:
        """Return whether the store is in use and has no file with the block's key."""
        return self._up and self._name(key) not in self._files

    def read(self, keys: Sequence[BlockKey]) -> list[Tensor]:
        """Return the first of the blocks, up to the first one that is not on disk or cannot be read."""
        blocks: list[Tensor] = []
        for key in keys:
            began = time.monotonic()
            if (block := self.get(key)) is None:
                break
            self.cost.record(time.monotonic() - began, 1)
            blocks.append(block)
        return blocks

    def get(self, key: BlockKey) -> Tensor | None:
        """Return a block; None if it is not on disk or could not be read."""
        name = self._name(key)
        with self._lock:
            if not (self._up and self._files.touch(name)):
                return None
        path = self._directory / name
        try:
            block = self._format.read(key, path)
        except DiskStalled as error:  # keeps the file: deleting it would stall as well
            self._disable(f"{path}: {error}")
            return None
        except Exception as error:  # file missing, truncated or corrupt; safetensors raises several types
            if path.exists() or not self._directory.is_dir():
                self._disable(f"{path}: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    path.unlink()  # deletes it so that the next server does not read it again
            self._forget(name)
            return None
        with self._lock:
            self._read += block is not None
        return block

    def _scan(self) -> None:
        """Index the files of earlier servers, and remove stale partial files."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: the files contain users' tokens
        if (mode := stat.S_IMODE(self._directory.stat().st_mode)) & 0o077:
            log.warning(
                "disk_cache_dir: %s has mode %04o: other users can see which blocks it has; use 0700, as for a new one",
                self._directory,
                mode,
            )
        files = []
        for path in self._directory.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):  # another server may have evicted the file
                name, status = path.relative_to(self._directory).as_posix(), path.stat()
                if NAME.fullmatch(name):
                    files.append((status.st_mtime_ns, name, status.st_size))
                elif path.suffix == PARTIAL and time.time() - status.st_mtime > PARTIAL_SECONDS:
                    path.unlink()
        for _, name, size in sorted(files):
            self._remember(name, size)
        self._evict(0)  # applies the budget, which may have been larger before

    def _name(self, key: BlockKey) -> str:
        return f"{self._fingerprint}/{key.name[:2]}/{key.name}{SUFFIX}"

    def _write(self, key: BlockKey, block: Tensor) -> None:
        if self.should_write(key):
            try:
                self._write_file(key, block)
            except Exception as error:  # the writer must survive any error, or the queue would never empty
                self._disable(f"cannot be written: {type(error).__name__}: {error}")

    def _write_file(self, key: BlockKey, block: Tensor) -> None:
        data = self._format.encode(key, block)
        if len(data) > self._budget:
            raise OSError(f"a block takes {len(data)} bytes, and the budget is {self._budget}")
        self._evict(len(data))
        name = self._name(key)
        path = self._directory / name
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PARTIAL, delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, path)  # atomic: a file with its final name is complete
            except OSError:
                os.unlink(file.name)
                raise
        self._remember(name, len(data))
        with self._lock:
            self._written += 1

    def _evict(self, nbytes: int) -> None:
        """Delete the least recently used files until `nbytes` more fit into the budget."""
        with self._lock:
            excess = self._files.excess(self._budget - nbytes)
        for oldest in excess:
            self._forget(oldest)
            (self._directory / oldest).unlink(missing_ok=True)

    def _remember(self, name: str, nbytes: int) -> None:
        """Index a file as the most recently used."""
        with self._lock:
            self._num_blocks += name not in self._files and name.startswith(self._fingerprint)
            self._files.put(name, None, nbytes)

    def _forget(self, name: str) -> None:
        """Remove a file from the index."""
        with self._lock:
            if self._files.remove(name):
                self._num_blocks -= name.startswith(self._fingerprint)

    def _disable(self, reason: str) -> None:
        with self._lock:
            if not self._up:
                return
            log.error("disk_cache_dir: %s; the disk cache is disabled until the model is loaded again", reason)
            self._up = False
        self._changed()
