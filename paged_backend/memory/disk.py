"""Cached blocks on disk, so that a server that starts again finds its prefixes.

directory/<fingerprint of model and layout>/<first two digits>/<key>.safetensors, one file a block, with its origin, all
tokens up to its end and a digest of its bytes. Origin and tokens are compared with what is looked for; a file of others
that have the same key is left alone. What does not read back exactly as it was written is never used: at the first such
file, or any other trouble, the tier goes off and the server serves on without it. A file that is gone has only made way
for others: the budget is one for all fingerprints, and servers may share a directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue

import torch
import transformers
from safetensors.torch import load, save
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import Origin
from paged_backend.scheduling.content import Chain, Contents, Entry, Key
from paged_backend.utils.machine import use_single_thread

log = logging.getLogger("paged_llm")

QUEUE = 64  # blocks that wait to be written; past that they are left out
SUFFIX, PART = ".safetensors", ".part"
READ_SECONDS = 5.0  # that a block may take to be read; every request of the engine waits for it
PART_SECONDS = 3600  # after which a half-written file is nobody's any more
MAX_HEADER_BYTES = 1 << 20  # of a file beside its tensors
MAX_PREFIX_BYTES = 1 << 26  # of tokens: four each
TOKENS = "tokens"  # of the prefix, beside the tensors of the block, which are numbered
TOKEN_TYPE = torch.int32
NAME = re.compile(rf"[0-9a-f]+/[0-9a-f]{{2}}/[0-9a-f]{{64}}{re.escape(SUFFIX)}")
MODEL_FILES = ("*.json", "*.safetensors", "*.py")


class Stalled(Exception):
    """A disk that does not answer; the message says for how long."""


class Damaged(Exception):
    """A file that is not what it should be; the message says what is wrong."""


@dataclass(frozen=True)
class DiskStats:
    up: bool
    blocks: int
    nbytes: int
    read: int  # blocks, since the start
    written: int
    dropped: int  # blocks that found the queue full


class DiskTier:
    """Reads on the caller's thread, writes on its own. Safe to use from any thread."""

    def __init__(self, directory: Path, fingerprint: str, budget: int, layout: Sequence[Tensor]):
        """`budget` in bytes, for the whole directory. `layout`: the tensors of one block, as they will be written and
        read."""
        self._directory = directory
        self._fingerprint = fingerprint
        self._budget = budget
        self._layout = [(tensor.shape, tensor.dtype) for tensor in layout]
        self._largest = MAX_HEADER_BYTES + MAX_PREFIX_BYTES + sum(tensor.nbytes for tensor in layout)
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes of each, by name, least recently used first
        self._nbytes = 0
        self._ours = 0  # files of this fingerprint
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
            return DiskStats(self._up, self._ours, self._nbytes, self._read, self._written, self._left_out)

    @property
    def free_queue_slots(self) -> int:
        """How many blocks the queue takes now."""
        return QUEUE - self._queue.qsize()

    @property
    def is_idle(self) -> bool:
        """Whether all that was queued is written."""
        return not self._queue.unfinished_tasks

    def should_write(self, entry: Entry) -> bool:
        """Whether there is room for it under its key."""
        name = self._name(entry.key)
        with self._lock:
            return self._up and name not in self._files

    def put(self, entry: Entry, tensors: Sequence[Tensor]) -> None:
        """Have a block written, if the queue has room and it is not there by then. `tensors` must not change any
        more."""
        try:
            self._queue.put_nowait((entry, list(tensors)))
        except Full:
            with self._lock:
                self._left_out += 1

    def get(self, entry: Entry) -> list[Tensor] | None:
        """A block by what it holds, if it is there and as it was written."""
        name = self._name(entry.key)
        with self._lock:
            if not self._up or name not in self._files:
                return None
            self._files.move_to_end(name)
        path = self._directory / name
        try:
            found = self._load(entry, path)
        except Stalled as error:  # whoever looks at the file again waits as well
            self._fail(f"{path}: {error}")
            return None
        except Exception as error:  # gone, cut off, no safetensors at all, another's: the library has many words
            if path.exists() or not self._directory.is_dir():
                self._fail(f"{path}: {type(error).__name__}: {error}")
                with contextlib.suppress(OSError):
                    path.unlink()  # or the next server would meet it again
            self._forget(name)
            return None
        with self._lock:
            self._read += found is not None
        return found

    def settle(self, timeout: float) -> None:
        """Wait until all that is queued is written, or so many seconds."""
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self, seconds: float | None = None) -> None:
        """Write what is queued, and end; wait so long for it at the most, or as long as it takes."""
        with contextlib.suppress(Full):
            self._queue.put(None, timeout=None if seconds is None else max(0.0, seconds))
            self._writer.join(None if seconds is None else max(0.0, seconds))

    def _scan(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # files tell which tokens they are of
        found = []
        for path in self._directory.glob("*/*/*"):
            with contextlib.suppress(FileNotFoundError):  # another server's, that made way
                name, status = path.relative_to(self._directory).as_posix(), path.stat()
                if NAME.fullmatch(name):
                    found.append((status.st_mtime_ns, name, status.st_size))
                elif path.suffix == PART and time.time() - status.st_mtime > PART_SECONDS:
                    path.unlink()
        for _, name, size in sorted(found):
            self._book(name, size)
        self._make_room(0)  # an earlier server may have had a larger budget

    def _name(self, key: Key) -> str:
        return f"{self._fingerprint}/{key.hex()[:2]}/{key.hex()}{SUFFIX}"

    def _book(self, name: str, nbytes: int) -> None:
        self._forget(name)
        with self._lock:
            self._files[name] = nbytes
            self._nbytes += nbytes
            self._ours += name.startswith(self._fingerprint)

    def _forget(self, name: str) -> None:
        with self._lock:
            nbytes = self._files.pop(name, None)
            if nbytes is not None:
                self._nbytes -= nbytes
                self._ours -= name.startswith(self._fingerprint)

    def _write_all(self) -> None:
        use_single_thread()
        while (item := self._queue.get()) is not None:
            if self.should_write(item[0]):
                try:
                    self._write(*item)
                except Exception as error:  # the disk is full, or gone, or not ours to write, or whatever it was
                    self._fail(f"cannot be written: {type(error).__name__}: {error}")
            self._queue.task_done()

    def _write(self, entry: Entry, tensors: list[Tensor]) -> None:
        origin, tokens = entry.prefix
        metadata = {"salt": origin.salt, "adapter": origin.adapter.hex(), "digest": _digest(tensors)}
        held = {str(index): tensor for index, tensor in enumerate(tensors)}
        data = save(held | {TOKENS: torch.tensor(tokens, dtype=TOKEN_TYPE)}, metadata)
        if len(data) > self._budget:
            raise OSError(f"a block takes {len(data)} bytes, and the budget is {self._budget}")
        self._make_room(len(data))
        name = self._name(entry.key)
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=PART, delete=False) as file:
            try:
                file.write(data)
                file.close()
                os.replace(file.name, path)  # a file under its own name is whole
            except OSError:
                os.unlink(file.name)  # a disk that is full has no room for halves
                raise
        self._book(name, len(data))
        with self._lock:
            self._written += 1

    def _make_room(self, nbytes: int) -> None:
        while True:
            with self._lock:
                if self._nbytes + nbytes <= self._budget:
                    return
                oldest = next(iter(self._files))
            self._forget(oldest)
            (self._directory / oldest).unlink(missing_ok=True)

    def _load(self, entry: Entry, path: Path) -> list[Tensor] | None:
        """None: it is of others, whose key is the same."""
        data = _read(path, self._largest + 1)
        if len(data) > self._largest:
            raise Damaged("is larger than a block")
        metadata, held = _metadata(data), load(data)
        tensors = [held[str(index)] for index in range(len(self._layout))]
        origin, tokens = Origin(metadata["salt"], bytes.fromhex(metadata["adapter"])), held[TOKENS].tolist()
        if (origin, tokens) != entry.prefix:
            if _key(origin, tokens, len(entry.tokens)) != entry.key:
                raise Damaged("holds other tokens than its name says")
            return None
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != self._layout:
            raise Damaged("holds tensors of other shapes or types")
        if _digest(tensors) != metadata["digest"]:
            raise Damaged("its bytes have changed")
        return tensors

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._up:
                log.error("disk_cache_dir: %s; the tier is off until the model is loaded again", reason)
            self._up = False


def _key(origin: Origin, tokens: list[int], block_size: int) -> Key:
    """What the last of these blocks is called."""
    return Contents().extend(Chain(origin), tokens, len(tokens) // block_size, block_size).key


def _read(path: Path, most: int) -> bytes:
    """At most so many bytes, and the time noted: the order of use outlives the process. Raises Stalled."""
    answer: SimpleQueue[bytes | Exception] = SimpleQueue()

    def read() -> None:
        try:
            with path.open("rb") as file:  # not mapped: a disk that fails under a mapping ends the process
                data = file.read(most)
            os.utime(path)
            answer.put(data)
        except Exception as error:
            answer.put(error)

    threading.Thread(target=read, name="disk-read", daemon=True).start()  # one that hangs is left behind
    try:
        found = answer.get(timeout=READ_SECONDS)
    except Empty:
        raise Stalled(f"a read takes more than {READ_SECONDS:g} s") from None
    if isinstance(found, Exception):
        raise found
    return found


def _metadata(data: bytes) -> dict[str, str]:
    """What the library reads from mapped files alone."""
    end = 8 + int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8:end]).get("__metadata__", {}))


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    return [model] if model.is_file() else [file for name in MODEL_FILES for file in sorted(model.glob(name))]


def fingerprint(config: EngineConfig, models: Sequence[Path], dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """A name for everything that keys and values depend on beside the tokens. Of the models' files it takes names,
    sizes and times of change: whoever touches one starts afresh."""
    files = [file for model in models for file in _files(model)]
    facts = {
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "transformers": transformers.__version__,
        "options": [config.load_format, config.seed if config.load_format == "dummy" else None],
        "layout": [str(dtype), str(kv_dtype), config.quantization, config.block_size],
        "code": "2",  # of this file: to be changed with the format
    }
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
