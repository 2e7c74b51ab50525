"""Registry of the LoRA adapters that requests may name, and a host-memory cache of their weights.

`multi_lora.json`, beside `model.json`, lists the adapters: `{name: directory}`, with directories relative to the file.
It is read again whenever it changes: an added entry can be requested at once, and a removed one is refused from then
on. An error in the files of one adapter only fails the requests that name it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from paged_backend.api.errors import ConfigError, ErrorCode, RequestError, invalid_argument
from paged_backend.api.request import Adapter
from paged_backend.models.peft_files import (
    AdapterError,
    LoraShapes,
    check_adapter,
    read_adapter,
    read_config,
    signature,
)
from paged_backend.utils.machine import use_single_thread
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

MAX_SHOWN_NAMES = 50  # maximum number of names in an error message


class AdapterListFile:
    """The contents of multi_lora.json. Thread-safe."""

    def __init__(self, file: Path | None) -> None:
        """Read the file. Raises ConfigError if it is missing or invalid.

        If the file is removed later, no adapters are listed until it is there again.
        """
        if file is not None and not file.exists():
            raise ConfigError(
                f"enable_lora=true: {file}: no such file; create it with {{}} in it to add adapters later"
            )
        self._file = file
        self._lock = threading.Lock()
        self._file_state: Any = None  # identifies the version that was read
        self._paths: Mapping[str, Path] = {}
        self._refresh()

    def paths(self, name: str | None = None) -> Mapping[str, Path]:
        """Return the current directories by name, or the last valid ones if the file has become invalid.

        If `name` is not among them, the file is read again even if its modification time is unchanged.
        """
        with self._lock:
            try:
                self._refresh()
                if name is not None and name not in self._paths:
                    self._refresh(force=True)
            except ConfigError as error:
                log.error("%s; its last valid contents stay in effect", error)
            return self._paths

    def _refresh(self, *, force: bool = False) -> None:
        if self._file is None:
            return
        try:
            status = os.stat(self._file)
            state = (status.st_mtime_ns, status.st_size, status.st_ino)
        except FileNotFoundError:
            state = None
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror}") from error
        if state == self._file_state and not (force and state):
            return
        self._file_state = state
        self._paths = _read(self._file) if state else {}


def _read(file: Path) -> dict[str, Path]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(path, str) and path for path in values.values()):
        raise ConfigError(f"{file}: must contain a JSON object of names and directories")
    return {name: file.resolve().parent / directory for name, directory in values.items()}


class AdapterRegistry:
    """Loads adapters by name, and caches the most recently used ones in host memory.

    `check`, `run` and `close` may be called from any thread. `get` and `describe` read files; call them through `run`,
    which executes calls one after the other on a thread of its own.
    """

    def __init__(
        self, listing: AdapterListFile, shapes: LoraShapes, dtype: torch.dtype, *, max_rank: int, max_cached: int
    ) -> None:
        """shapes: shapes of the adaptable layers. max_cached: maximum number of adapters in host memory."""
        self._listing = listing
        self._shapes = shapes
        self._dtype = dtype
        self._max_rank = max_rank
        self._max_cached = max_cached
        # Adapters and digests by directory, each with the signature of its files.
        self._cache: OrderedDict[Path, tuple[Any, Adapter]] = OrderedDict()  # least recently used first
        self._digests: dict[Path, tuple[Any, bytes]] = {}  # digest of every adapter that has been loaded
        self._broken: set[Path] = set()  # adapters that could not be used when they were last read
        self._thread = BackgroundWorker("adapters", use_single_thread)
        for name, path in listing.paths().items():
            try:
                signature(path)
                check_adapter(path, shapes, max_rank)
            except AdapterError as error:
                self._broken.add(path)
                log.warning("adapter %s in %s cannot be used: %s", name, path, error)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run a call on the registry's thread."""
        self._thread.submit(call, *arguments)

    def close(self, seconds: float) -> None:
        """Wait for the running call, but at most `seconds`."""
        self._thread.stop(seconds)

    def check(self, name: str) -> None:
        """Raise RequestError if the name is not listed. Reads the list again if its file has changed."""
        self._path(name)

    def get(self, name: str) -> Adapter:
        """Return the adapter in the current version of its files. Raises RequestError."""
        path = self._path(name)
        try:
            adapter = self._load(name, path)
            self._broken.discard(path)
            return adapter
        except AdapterError as error:
            self._broken.add(path)
            log.warning("adapter %s in %s cannot be used: %s", name, path, error)
            raise invalid_argument("lora_name", name, f"cannot be used: {error}") from error

    def describe(self, resident: Collection[Adapter]) -> list[dict[str, Any]]:
        """Return name, rank and residency of each listed adapter. `resident` are the adapters on the device.

        An adapter that cannot be used has an error and no rank.
        """
        on_device = {adapter.digest for adapter in resident}
        return [self._describe(name, path, on_device) for name, path in self._listing.paths().items()]

    def _describe(self, name: str, path: Path, on_device: Collection[bytes]) -> dict[str, Any]:
        try:
            current, (loaded, digest) = signature(path), self._digests.get(path, (None, b""))
            rank = read_config(path, self._max_rank).max_rank
        except AdapterError as error:
            return {"name": name, "rank": None, "resident": False, "error": str(error)}
        return {"name": name, "rank": rank, "resident": loaded == current and digest in on_device}

    def _path(self, name: str) -> Path:
        paths = self._listing.paths(name)
        if name not in paths:
            names = [listed for listed, path in paths.items() if path not in self._broken]
            hidden = len(names) - MAX_SHOWN_NAMES
            shown = f"{names[:MAX_SHOWN_NAMES]}" + (f" and {hidden} more" if hidden > 0 else "")
            text = f"LoRA {name} is not supported, we currently support {shown}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, text, verbatim=True)
        return paths[name]

    def _load(self, name: str, path: Path) -> Adapter:
        current = signature(path)
        cached, adapter = self._cache.get(path, (None, None))
        if adapter is None or cached != current:
            adapter = read_adapter(name, path, self._shapes, self._dtype, self._max_rank)
            if signature(path) != current:  # files changed while being read
                raise AdapterError("its files changed while they were read; try again")
            log.info("loaded adapter %s from %s: rank %d, %d layers", name, path, adapter.rank, len(adapter.factors))
            self._cache[path], self._digests[path] = (current, adapter), (current, adapter.digest)
        self._cache.move_to_end(path)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return adapter
