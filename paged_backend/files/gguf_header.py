"""Read the header of a GGUF file: where its tensors are, without its metadata and without their bytes.

The package gguf converts all metadata, which takes seconds for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paged_backend.api.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by type of a value
MAX_DIMENSIONS = 4


class Tensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    type: str
    num_elements: int
    start: int  # position of its first byte in the file
    nbytes: int


class Header(NamedTuple):
    """What a GGUF file says about its tensors."""

    tensors: tuple[Tensor, ...]  # in the order of their bytes
    alignment: int


def read_header(path: Path) -> Header:
    """Return the header of a file. Raises ConfigError if it is truncated, damaged or of another format, or if the
    package gguf, which has the sizes of the types, is missing."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise ConfigError(f"{path}: reading it requires the package gguf: {error}") from error
    sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header(sizes)
    except (OSError, ValueError, KeyError, struct.error, MemoryError, OverflowError) as error:
        raise ConfigError(f"{path}: is truncated, damaged or no GGUF file: {error}") from error


class _Reader:
    """Reads values one after the other. Raises struct.error at the end of the file, ValueError for other damage."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place = data, 0

    def header(self, sizes: dict[int, tuple[str, int, int]]) -> Header:
        """Return the header. sizes: name, elements per block and bytes per block of each tensor type."""
        if self._data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._place = 4
        (version,) = self._read("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}: must be one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_fields = self._read("<QQ")
        alignment = DEFAULT_ALIGNMENT
        for _ in range(num_fields):
            name, (kind,) = self._string(), self._read("<I")
            if name == ALIGNMENT and kind == 4:
                (alignment,) = self._read("<I")
            else:
                self._skip(kind)
        if alignment < 1:
            raise ValueError(f"{ALIGNMENT}={alignment}: must be at least 1")
        infos = list(self._infos(num_tensors))
        begin = -(-self._place // alignment) * alignment
        tensors = [_placed(name, shape, begin + offset, *sizes[kind]) for name, shape, kind, offset in infos]
        if late := next((tensor for tensor in tensors if tensor.start + tensor.nbytes > len(self._data)), None):
            end = late.start + late.nbytes
            raise ValueError(f"{late.name} ends at byte {end}, the file at {len(self._data)}")
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two tensors have the same name")
        return Header(tuple(sorted(tensors, key=lambda tensor: tensor.start)), alignment)

    def _infos(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        for _ in range(count):
            name, (dimensions,) = self._string(), self._read("<I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"{name}: {dimensions} dimensions; must be at most {MAX_DIMENSIONS}")
            shape = self._read(f"<{dimensions}Q")
            yield name, shape, *self._read("<IQ")

    def _read(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._place)
        self._place += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._read("<Q")
        begin = self._place
        self._advance(length)
        return self._data[begin : self._place].decode()

    def _advance(self, nbytes: int) -> None:
        self._place += nbytes
        if self._place > len(self._data):
            raise ValueError(f"the header ends at byte {self._place} or later, the file at {len(self._data)}")

    def _skip(self, kind: int) -> None:
        """Pass over a value."""
        if kind == STRING:
            (length,) = self._read("<Q")
            self._advance(length)
        elif kind == ARRAY:
            item, count = self._read("<IQ")
            if item in SCALARS:
                self._advance(SCALARS[item] * count)
            elif item == STRING:
                for _ in range(count):
                    self._skip(STRING)
            else:  # no writer nests arrays
                raise ValueError(f"an array of the type {item}: must be numbers or strings")
        elif kind in SCALARS:
            self._advance(SCALARS[kind])
        else:
            raise ValueError(f"a value of the unknown type {kind}")


def _placed(name: str, shape: tuple[int, ...], start: int, kind: str, block: int, block_bytes: int) -> Tensor:
    elements = 1
    for size in shape:
        elements *= size
    if (shape[0] if shape else 1) % block:
        raise ValueError(f"{name}: rows of {shape[0]} elements; must be a multiple of {block} for {kind}")
    return Tensor(name, kind, elements, start, elements // block * block_bytes)
