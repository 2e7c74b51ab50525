"""The format of a cached block on disk or in a remote store.

A block of one kind of layer is one safetensors file: the bytes of its pages, all tokens of its prefix up to the block's
end, and as metadata the origin (cache salt and adapter) and a digest of the pages. A read compares origin and
tokens with the requested ones, so a colliding key is a miss and never gives a wrong block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.kv.content import BlockKey, Chain, Contents, Key
from paged_backend.utils.worker import CallTimeout, call_with_timeout

READ_SECONDS = 5.0  # limit of one read, for which every request that prefetches from disk waits
MAX_HEADER_BYTES = 1 << 20  # maximum size of a file besides pages and tokens
MAX_PREFIX_BYTES = 1 << 26  # maximum size of the prefix tokens, four bytes each
PAGES, TOKENS = "pages", "tokens"  # names of the tensors that hold the block and its prefix
TOKEN_TYPE = torch.int32
FORMAT_VERSION = "6"  # part of the fingerprint; changed with the format


class DiskStalled(Exception):
    """A disk read timed out; the message has the time."""


class CorruptFile(Exception):
    """A block file is corrupt; the message says how."""


class BlockFormat:
    """Encodes and decodes the blocks of a model."""

    def __init__(self, num_pages: Sequence[int], page_bytes: int):
        """num_pages: pages of a block, by kind of layer."""
        self._shapes = [(pages, page_bytes) for pages in num_pages]
        self.block_bytes = max(num_pages) * page_bytes
        self._max_bytes = MAX_HEADER_BYTES + MAX_PREFIX_BYTES + self.block_bytes

    def encode(self, key: BlockKey, block: Tensor) -> bytes:
        """Return the content of a block's file. block: [pages, page_bytes] uint8."""
        origin, tokens = key.entry.prefix
        metadata = {"salt": origin.salt, "adapter": origin.adapter.hex(), "digest": _digest(block)}
        return save({PAGES: block, TOKENS: torch.tensor(tokens, dtype=TOKEN_TYPE)}, metadata)

    def read(self, key: BlockKey, path: Path) -> Tensor | None:
        """Return the block in a file, or None if it is another block with the same key.

        Raises DiskStalled, CorruptFile, OSError, and whatever safetensors raises for files that it cannot read.
        """
        data = _read_bytes(path, self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise CorruptFile("is larger than a block")
        return self.decode(key, data)

    def decode(self, key: BlockKey, data: bytes) -> Tensor | None:
        """Return the block in the content of a file, or None if it is another block with the same key.

        Raises CorruptFile, and whatever safetensors raises for content that it cannot read.
        """
        entry, metadata, held = key.entry, _metadata(data), load(data)
        origin, tokens = Origin(metadata["salt"], bytes.fromhex(metadata["adapter"])), held[TOKENS].tolist()
        if (origin, tokens) != entry.prefix:
            if _key(origin, tokens, len(entry.tokens)) != entry.key:
                raise CorruptFile("holds other tokens than its name says")
            return None
        block = held[PAGES]
        if (block.shape, block.dtype) != (self._shapes[key.kind], torch.uint8):
            raise CorruptFile("holds pages of another size")
        if _digest(block) != metadata["digest"]:
            raise CorruptFile("its bytes have changed")
        return block


def _key(origin: Origin, tokens: list[int], block_size: int) -> Key:
    """Return the key of the last block of a prefix."""
    return Contents().extend(Chain(origin), tokens, len(tokens) // block_size, block_size).key


def _read_bytes(path: Path, limit: int) -> bytes:
    """Return up to `limit` bytes of a file, and update its time, which keeps the LRU order across restarts. Raises
    DiskStalled if the read times out."""

    def read() -> bytes:
        with path.open("rb") as file:  # read, not mapped: an I/O error in mapped memory would end the process
            data = file.read(limit)
        os.utime(path)
        return data

    try:
        return call_with_timeout(read, READ_SECONDS, "disk-read")
    except CallTimeout as error:
        raise DiskStalled(f"a read {error}") from None


def _metadata(data: bytes) -> dict[str, str]:
    """Return a safetensors file's metadata. (The library reads it from mapped files only.)"""
    end = 8 + int.from_bytes(data[:8], "little")
    return dict(json.loads(data[8:end]).get("__metadata__", {}))


def _digest(block: Tensor) -> str:
    return blake2b(block.numpy().data, digest_size=16).hexdigest()
