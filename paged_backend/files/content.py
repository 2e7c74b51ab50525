"""The content of a model's files as a digest, which tells a model from a fine-tune of the same shape.

All bytes count, because a fine-tune may change single rows of a table. The files are read only once, on up to 8 cores:
the digest of a file is stored with its size, inode and times, and an unchanged file is not read again. The times
include the last change of the inode, which tools that set the modification time cannot set.
"""

from __future__ import annotations

import hashlib
import json
import logging
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import NamedTemporaryFile

from paged_backend.files import model_files
from paged_backend.utils import machine

log = logging.getLogger("paged_llm")

PIECE, CHUNK = 64 * 2**20, 2**20  # bytes that a thread hashes, and that it reads at a time
MOST_FILES = 200  # maximum records of a kind; older ones are deleted
READ = (".json", ".py", ".model", ".txt", ".jinja")  # suffixes of a model's files besides its weights


def records() -> Path:
    """Return the directory of what earlier starts recorded about models."""
    return machine.user_cache_directory() / "starts"


def write_record(file: Path, value: object) -> None:
    """Write a file atomically, and delete the oldest files of its kind. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        made = Path(temporary.name)
        try:
            json.dump(value, temporary)
            temporary.flush()
            made.replace(file)
        except OSError:
            made.unlink(missing_ok=True)
            raise
    kind = sorted(file.parent.glob(f"{file.name.partition('-')[0]}-*.json"), key=lambda record: record.stat().st_mtime)
    for old in kind[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def content_of(path: Path) -> str:
    """Return the digest of the files that a model is loaded from: a directory, or a file. It is the same for a copy."""
    files = [path]
    if path.is_dir():
        texts = [file for file in path.iterdir() if file.suffix in READ and file.is_file()]
        weights = model_files.weight_files(path) if model_files.has_weights(path) else []
        files = sorted({*texts, *weights})
    known_file = records() / f"files-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        known = {name: list(values) for name, values in json.loads(known_file.read_text()).items()}
    except Exception:  # missing, damaged, or unreadable
        known = {}
    hashes = {}
    for file in files:
        state = file.stat()
        signature = [state.st_size, state.st_dev, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
        before = known.get(str(file), [])
        hashes[str(file)] = before if before[:-1] == signature else [*signature, hash_of(file)]
    if hashes != known:
        try:
            write_record(known_file, hashes)
        except OSError as error:
            log.info("hashes of the model's files are not stored: %s", error)
    names = [] if path.is_file() else [file.name for file in files]
    return hashlib.sha256(json.dumps([names, [values[-1] for values in hashes.values()]]).encode()).hexdigest()


def hash_of(file: Path) -> str:
    """Return the hash of the hashes of a file's pieces, which are computed on several cores."""

    def piece(start: int) -> bytes:
        digest = hashlib.sha256()
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            for _ in range(-(-PIECE // CHUNK)):
                digest.update(opened.read(min(CHUNK, PIECE)))
        return digest.digest()

    with ThreadPool(min(8, machine.usable_cores())) as pool:  # daemon threads, which do not delay an exit
        return hashlib.sha256(b"".join(pool.map(piece, range(0, file.stat().st_size, PIECE), 1))).hexdigest()
