"""Compares the model's files and the software of the ranks of an engine, which must be the same on all machines.

Ranks on several machines load the model from their own disks. Files of the same shape with other weights, such as
another revision or fine-tune, would give wrong tokens and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch
import transformers

from paged_backend.loading.earlier_starts import source_files

MODEL_FILES = ("*.json", "*.safetensors", "*.py")
SAMPLES = 64  # places of a large file that are compared
SAMPLE_BYTES = 1 << 14

Facts = Mapping[str, str]


def rank_facts(model: Path) -> Facts:
    """Return what a rank has, by name: digests of its model's files and of this project, and versions.

    Of a large file, its size and SAMPLES of its bytes are compared, so the time does not depend on the model's size.
    """
    facts = {
        "version of this project": _digest_code(),
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
    }
    return facts | {f"file {file.name} of the model": _digest(file) for file in _model_files(model)}


def _model_files(model: Path) -> list[Path]:
    return [model] if model.is_file() else [file for name in MODEL_FILES for file in sorted(model.glob(name))]


def find_difference(own: Facts, other: Facts) -> str | None:
    """Return in words how another rank differs from this one; None if it does not."""
    for name in sorted(own.keys() | other.keys()):
        ours, theirs = own.get(name), other.get(name)
        if theirs is None:
            return f"{name}: missing there"
        if ours is None:
            return f"{name}: missing on the server's machine"
        if ours != theirs:
            shown = f" ({theirs}, and {ours} on the server's machine)" if name.startswith("version of t") else ""
            return f"{name}: differs from that on the server's machine{shown}"
    return None


def _digest(file: Path) -> str:
    digest, size = blake2b(digest_size=16), file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (SAMPLES - 1))
    with file.open("rb") as opened:
        for start in range(0, size, step):
            opened.seek(start)
            digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _digest_code() -> str:
    digest = blake2b(digest_size=16)
    for file in sorted(source_files()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
