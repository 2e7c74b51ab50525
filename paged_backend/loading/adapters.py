"""The adapters that may be asked for by name, and those of them that are in the host's memory.

`multi_lora.json`, beside `model.json`, lists them: `{name: directory}`, a relative directory taken from its own. It is
read again when it has changed, so a line that is added serves an adapter, and one that is removed ends it for requests
to come. What is wrong with the files of one adapter fails the requests that name it, and no others.
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

from paged_backend.api.config import ConfigError
from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.request import Adapter
from paged_backend.models.peft_files import AdapterError, LoraShapes, read_adapter, read_config, signature
from paged_backend.utils.machine import use_single_thread
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

SHOWN = 50  # names in an error


class AdapterListFile:
    """What the file says. Safe to use from any thread."""

    def __init__(self, file: Path | None):
        """Raises ConfigError for a file that is there and cannot be used."""
        self._file = file
        self._lock = threading.Lock()
        self._seen: Any = None
        self._paths: Mapping[str, Path] = {}
        self._refresh()

    def paths(self, name: str | None = None) -> Mapping[str, Path]:
        """Directories by name, as the file has them now, or had them where it cannot be read any more. For a `name`
        that they lack the file is read whatever its times say."""
        with self._lock:
            try:
                self._refresh()
                if name is not None and name not in self._paths:
                    self._refresh(anew=True)
            except ConfigError as error:
                log.error("%s; what it said before still holds", error)
            return self._paths

    def _refresh(self, *, anew: bool = False) -> None:
        if self._file is None:
            return
        try:
            found = os.stat(self._file)
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        except FileNotFoundError:
            seen = None
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror}") from error
        if seen == self._seen and not (anew and seen):
            return
        self._seen = seen
        self._paths = _read(self._file) if seen else {}


def _read(file: Path) -> dict[str, Path]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(one, str) and one for one in values.values()):
        raise ConfigError(f"{file}: must hold one JSON object of names and directories")
    return {name: file.resolve().parent / directory for name, directory in values.items()}


class AdapterRegistry:
    """Adapters by name. `check` and `run` are quick and for any thread; what reads files is for the thread that `run`
    has calls made on, one after the other."""

    def __init__(
        self, listing: AdapterListFile, shapes: LoraShapes, dtype: torch.dtype, *, max_rank: int, max_cached: int
    ):
        """shapes: of the layers that adapters may change. keep: how many stay in the host's memory."""
        self._listing = listing
        self._shapes = shapes
        self._dtype = dtype
        self._max_rank = max_rank
        self._keep = max_cached
        self._kept: OrderedDict[Path, tuple[Any, Adapter]] = OrderedDict()  # with the files' signature
        self._digests: dict[Path, tuple[Any, bytes]] = {}  # of all that were ever read, likewise
        self._thread = BackgroundWorker("adapters", use_single_thread)
        for name, path in listing.paths().items():
            try:
                signature(path)
                read_config(path, max_rank)
            except AdapterError as error:
                log.warning("adapter %s in %s cannot be served: %s", name, path, error)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        self._thread.submit(call, *arguments)

    def close(self, seconds: float) -> None:
        """Wait for what is under way, so many seconds at the most."""
        self._thread.stop(seconds)

    def check(self, name: str) -> None:
        """Raises RequestError for a name that is not listed. Looks at the list's file, and reads it if it changed."""
        self._path(name)

    def get(self, name: str) -> Adapter:
        """The adapter as its files are now. Raises RequestError."""
        path = self._path(name)
        try:
            return self._load(name, path)
        except AdapterError as error:
            log.warning("adapter %s in %s cannot be served: %s", name, path, error)
            raise invalid_argument("lora_name", name, f"cannot be served: {error}") from error

    def describe(self, resident: Collection[Adapter]) -> list[dict[str, Any]]:
        """Of each adapter its name, its rank, and whether it is one of those `resident` on the device. One that cannot
        be served has an error in place of a rank."""
        on_device = {adapter.digest for adapter in resident}
        return [self._describe(name, path, on_device) for name, path in self._listing.paths().items()]

    def _describe(self, name: str, path: Path, on_device: Collection[bytes]) -> dict[str, Any]:
        try:
            now, (seen, digest) = signature(path), self._digests.get(path, (None, b""))
            rank = read_config(path, self._max_rank).max_rank
        except AdapterError as error:
            return {"name": name, "rank": None, "resident": False, "error": str(error)}
        return {"name": name, "rank": rank, "resident": seen == now and digest in on_device}

    def _path(self, name: str) -> Path:
        paths = self._listing.paths(name)
        if name not in paths:
            names = list(paths)
            shown = f"{names[:SHOWN]}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            text = f"LoRA {name} is not supported, we currently support {shown}"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, text, verbatim=True)
        return paths[name]

    def _load(self, name: str, path: Path) -> Adapter:
        now = signature(path)
        kept, adapter = self._kept.get(path, (None, None))
        if adapter is None or kept != now:
            adapter = read_adapter(name, path, self._shapes, self._dtype, self._max_rank)
            if signature(path) != now:  # half old and half new, perhaps
                raise AdapterError("its files changed while they were read; try again")
            log.info("adapter %s read from %s: rank %d, %d layers", name, path, adapter.rank, len(adapter.factors))
            self._kept[path], self._digests[path] = (now, adapter), (now, adapter.digest)
        self._kept.move_to_end(path)
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return adapter
