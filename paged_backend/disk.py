"""Cached blocks on disk, so that a server that starts again finds its prefixes.

directory/<fingerprint of model and layout>/<first two digits>/<key>.safetensors, one file a block, with its tokens, the
key of the block before it and a digest of its bytes. What does not read back exactly as it was written is never used:
at the first such file, or any other trouble, the tier goes off and the server serves on without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Full, Queue

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from paged_backend.config import EngineConfig
from paged_backend.content import Entry, Key, chain_key

log = logging.getLogger("paged_llm")

QUEUE = 64  # blocks that wait to be written; past that they are left out
SUFFIX = ".safetensors"
MODEL_FILES = ("*.json", "*.safetensors", "*.py")


class Damaged(Exception):
    """A file that is not what it should be; the message says what is wrong."""


@dataclass(frozen=True)
class DiskStats:
    up: bool
    blocks: int
    nbytes: int
    read: int  # blocks, since the start
    written: int
    left_out: int  # blocks that found the queue full


class DiskTier:
    """Reads on the caller's thread, writes on its own. Safe to use from any thread."""

    def __init__(self, directory: Path, budget: int, layout: Sequence[Tensor]):
        """`budget` in bytes. `layout`: the tensors of one block, as they will be written and read."""
        self._directory = directory
        self._budget = budget
        self._layout = [(tensor.shape, tensor.dtype) for tensor in layout]
        self._lock = threading.Lock()
        self._files: OrderedDict[Key, int] = OrderedDict()  # bytes of each, least recently used first
        self._nbytes = 0
        self._up = True
        self._read = self._written = self._left_out = 0
        self._queue: Queue[tuple[Entry, list[Tensor]] | None] = Queue(QUEUE)
        try:
            self._scan()
        except OSError as error:
            self._fail(f"cannot be used: {error}")
        self._writer = threading.Thread(target=self._write_all, name="disk", daemon=True)
        self._writer.start()

    @property
    def up(self) -> bool:
        return self._up

    @property
    def stats(self) -> DiskStats:
        with self._lock:
            return DiskStats(self._up, len(self._files), self._nbytes, self._read, self._written, self._left_out)

    def lacks(self, key: Key) -> bool:
        with self._lock:
            return self._up and key not in self._files

    def put(self, entry: Entry, tensors: Sequence[Tensor], timeout: float = 0) -> None:
        """Have a block written. `tensors` must not change any more. Waits `timeout` seconds for room in the queue."""
        if not self.lacks(entry.key):
            return
        try:
            self._queue.put((entry, list(tensors)), block=timeout > 0, timeout=timeout)
        except Full:
            with self._lock:
                self._left_out += 1

    def get(self, key: Key) -> tuple[Entry, list[Tensor]] | None:
        """A block by its key, if it is there and as it was written."""
        with self._lock:
            if not self._up or key not in self._files:
                return None
            self._files.move_to_end(key)
        path = self._path(key)
        try:
            found = self._load(key, path)
            os.utime(path)  # the order of use outlives the process
        except Exception as error:  # gone, cut off, no safetensors at all, another's: the library has many words
            with self._lock:
                made_way = key not in self._files
            if not made_way:  # for a newer one, while it was read
                self._fail(f"{path}: {type(error).__name__}: {error}")
            return None
        with self._lock:
            self._read += 1
        return found

    def settle(self, timeout: float) -> None:
        """Wait until all that is queued is written, or so many seconds."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self) -> None:
        """Write what is queued, and end."""
        self._queue.put(None)
        self._writer.join()

    def _scan(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        found = []
        for path in self._directory.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(ValueError):  # not a name of ours
                status = path.stat()
                found.append((status.st_mtime_ns, bytes.fromhex(path.name.removesuffix(SUFFIX)), status.st_size))
        for leftover in self._directory.glob("*/*.part"):
            leftover.unlink(missing_ok=True)
        self._files = OrderedDict((key, size) for _, key, size in sorted(found))
        self._nbytes = sum(self._files.values())

    def _path(self, key: Key) -> Path:
        return self._directory / key.hex()[:2] / (key.hex() + SUFFIX)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.lacks(item[0].key):
                try:
                    self._write(*item)
                except Exception as error:  # the disk is full, or gone, or not ours to write, or whatever it was
                    self._fail(f"cannot be written: {type(error).__name__}: {error}")
            self._queue.task_done()

    def _write(self, entry: Entry, tensors: list[Tensor]) -> None:
        metadata = {"parent": entry.parent.hex(), "tokens": json.dumps(entry.tokens), "digest": _digest(tensors)}
        data = save({str(index): tensor for index, tensor in enumerate(tensors)}, metadata)
        if len(data) > self._budget:
            raise OSError(f"a block takes {len(data)} bytes, and the budget is {self._budget}")
        self._make_room(len(data))
        path = self._path(entry.key)
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, path)  # a file under its own name is whole
            except OSError:
                os.unlink(file.name)  # a disk that is full has no room for halves
                raise
        with self._lock:
            self._files[entry.key] = len(data)
            self._nbytes += len(data)
            self._written += 1

    def _make_room(self, nbytes: int) -> None:
        while True:
            with self._lock:
                if self._nbytes + nbytes <= self._budget:
                    return
                key, size = self._files.popitem(last=False)
                self._nbytes -= size
            self._path(key).unlink(missing_ok=True)

    def _load(self, key: Key, path: Path) -> tuple[Entry, list[Tensor]]:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = [file.get_tensor(str(index)) for index in range(len(self._layout))]
        entry = Entry(key, bytes.fromhex(metadata["parent"]), tuple(json.loads(metadata["tokens"])))
        if chain_key(entry.parent, entry.tokens) != key:
            raise Damaged("holds other tokens than its name says")
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != self._layout:
            raise Damaged("holds tensors of other shapes or types")
        if _digest(tensors) != metadata["digest"]:
            raise Damaged("its bytes have changed")
        return entry, tensors

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._up:
                log.error("disk_cache_dir: %s; the tier is off until the model is loaded again", reason)
            self._up = False


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprint(config: EngineConfig, model_directory: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """A name for everything that keys and values depend on beside the tokens. Of the model's files it takes names,
    sizes and times of change: whoever touches one starts afresh."""
    files = sorted(path for pattern in MODEL_FILES for path in model_directory.glob(pattern))
    facts = {
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "transformers": transformers.__version__,
        "options": [config.load_format, config.seed if config.load_format == "dummy" else None],
        "layout": [str(dtype), str(kv_dtype), config.block_size],
        "code": "1",  # of this file: to be changed with the format
    }
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
