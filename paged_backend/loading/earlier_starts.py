"""The result of a model's verification at an earlier start, for later starts of the same model in the same way.

A result is stored under a key of everything that it depends on: the content of the model's files, this package's code,
the versions of libraries, the processor, the options, and environment variables that select instructions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import paged_backend
import paged_kernels
from paged_backend.files.content import content_of, records, write_record
from paged_kernels.cpu import native

log = logging.getLogger("paged_llm")

LIBRARIES = (
    *("torch", "transformers", "tokenizers", "triton", "numpy", "safetensors", "gguf", "torchao", "bitsandbytes"),
    *("accelerate", "compressed-tensors", "mamba-ssm", "causal-conv1d", "kernels"),
)
# The beginnings of their names.
VARIABLES = ("PAGED_CPU_", "PAGED_GPU_", "ATEN_", "DNNL_", "ONEDNN_", "MKL_", "TORCH_", "CUBLAS_")


@dataclass(frozen=True)
class Outcome:
    """The result of a verification that rejected no variant."""

    variant: str  # name of the variant that runs
    latents: bool  # whether multi-head latent attention stores latents
    keeps_unused: bool  # whether the model needs the weights that its variant has copies of
    date: str = ""


class OutdatedOutcome(Exception):
    """The model cannot be put into the state that a stored outcome describes."""


class EarlierStarts:
    """The stored outcome for one model and configuration.

    The model's files are hashed in a thread of their own, while the model is loaded.
    """

    def __init__(self, path: Path, options: Mapping[str, object], device: torch.device) -> None:
        """path: the model's directory or GGUF file. options: the engine options by name."""
        self._directory = records()
        self._options = {**options, "model": None, "reuse_verification": None}
        self._device, self._is_used = device, bool(options["reuse_verification"])
        self._content = content = Future[str]()

        def hash_files() -> None:
            try:
                content.set_result(content_of(path))
            except Exception as error:
                content.set_exception(error)

        threading.Thread(target=hash_files, name="hash", daemon=True).start()

    def find(self) -> Outcome | None:
        """Return the stored outcome, or None."""
        if not self._is_used:
            return None
        try:
            outcome = Outcome(**json.loads(self._file.read_text()))
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file, or one that may not be read
            log.warning("the result of an earlier start cannot be read: %s: %s", type(error).__name__, error)
            return None
        with suppress(OSError):  # the file belongs to another user
            os.utime(self._file)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        """Store an outcome. A failure is logged."""
        try:
            write_record(self._file, asdict(replace(outcome, date=time.strftime("%Y-%m-%d %H:%M"))))
        except Exception as error:
            log.info("the result of the verification is not stored for later starts: %s", error)

    def forget(self) -> None:
        """Delete the stored outcome."""
        with suppress(OSError):
            self._file.unlink()

    @cached_property
    def _file(self) -> Path:
        key = [self._content.result(), _code(), _machine(self._device), self._options]
        digest = hashlib.sha256(json.dumps(key, default=str, sort_keys=True).encode())
        return self._directory / f"start-{digest.hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """Return the hash of the sources of this package and its kernels, and of the versions of libraries."""
    digest = hashlib.sha256(json.dumps([sys.version, [_version_of(name) for name in LIBRARIES]]).encode())
    for file in source_files():
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def source_files() -> Iterator[Path]:
    """Yield the files of this package and of its kernels."""
    for package in (paged_backend, paged_kernels):
        for root in package.__path__:
            yield from sorted(file for file in Path(root).rglob("*") if file.suffix in (".py", ".cpp", ".h"))


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _machine(device: torch.device) -> list[object]:
    """Return what identifies the processor and the way in which it is used."""
    level = native.level() if native.levels() else None
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
    facts: list[object] = [platform.machine(), level, torch.get_num_threads(), variables]
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    facts += [next((line for line in lines if line.startswith(field)), None) for field in ("model name", "flags")]
    if device.type == "cuda":
        facts += [torch.cuda.get_device_name(device), torch.version.cuda]
    return facts
