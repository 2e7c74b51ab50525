"""Messages between ranks as bytes, which hold values and no code, and cannot be forged.

digest                16 bytes over the rest and the number of the message, with a key that only the ranks know
kind, length          4 bytes each, little-endian: index of the message's type, and bytes of the values
values                msgpack; a tensor is its data type, its shape and the place of its content
contents of tensors   each aligned to 8 bytes
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

_DIGEST_BYTES = 16
_HEAD = struct.Struct("<II")
_START = _DIGEST_BYTES + _HEAD.size  # a multiple of 8, like everything after the values
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))}


class MessageError(RuntimeError):
    """A message is malformed, or was not sent by a rank."""


class Messages:
    """One end of a sequence of messages: it encodes all of them, or decodes all of them in the same order."""

    def __init__(self, key: bytes, name: str, *kinds: type):
        """key: a secret of at most 64 bytes. name: name of this use of the key, at most 16 characters. kinds: the types
        of the messages: dataclasses, named tuples, enumerations and NoneType, with values such as numbers, strings and
        tensors on the host."""
        self._seal = hashlib.blake2b(key=key, person=name.encode(), digest_size=_DIGEST_BYTES)
        self._kinds = {kind: number for number, kind in enumerate(kinds)}
        self._number = 0  # number of the next message
        self._contents: list[bytes] = []  # contents of the tensors in the message being encoded
        self._place = 0  # where the next content begins, after the values
        self._received = memoryview(b"")  # contents of the tensors in the message being decoded
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._write_tensor)
        self._decoders: list[Any] = [msgspec.msgpack.Decoder(kind, dec_hook=self._read_tensor) for kind in kinds]

    def encode(self, message: Any) -> bytearray:
        """Return a message as bytes."""
        self._contents, self._place = [], 0
        values = self._encoder.encode(message)
        head = _HEAD.pack(self._kinds[type(message)], len(values))
        rest = b"".join((head, values, bytes(-len(values) % 8), *self._contents))
        return bytearray().join((self._digest(rest), rest))

    def decode(self, data: memoryview) -> Any:
        """Return the next message, whose tensors are views of `data`. Raises MessageError."""
        if len(data) < _START or not hmac.compare_digest(self._digest(data[_DIGEST_BYTES:]), data[:_DIGEST_BYTES]):
            raise MessageError("a message is not from a rank of this engine, or not the next one")
        kind, length = _HEAD.unpack_from(data, _DIGEST_BYTES)
        end = _START + length
        self._received = data[end + -length % 8 :]
        try:
            return self._decoders[kind].decode(data[_START:end])
        except (msgspec.DecodeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise MessageError(f"a message of another rank cannot be read: {error}") from error

    def _digest(self, rest: bytes | memoryview) -> bytes:
        seal = self._seal.copy()
        seal.update(self._number.to_bytes(8, "little"))
        seal.update(rest)
        self._number += 1
        return seal.digest()

    def _write_tensor(self, tensor: Any) -> tuple[str, tuple[int, ...], int]:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(tensor).__name__}: cannot be part of a message")
        array, place = tensor.numpy(), self._place
        content = array.tobytes()
        padding = -len(content) % 8
        self._contents += (content, bytes(padding))
        self._place += len(content) + padding
        return array.dtype.str, array.shape, place

    def _read_tensor(self, kind: type, value: Any) -> Tensor:
        if kind is not Tensor:
            raise ValueError(f"{kind.__name__}: cannot be part of a message")
        dtype, shape, place = value
        # Unlike numpy.ndarray(), it refuses a place outside of the buffer.
        array = np.frombuffer(self._received, _DTYPES[dtype], math.prod(shape), place)
        return torch.from_numpy(array.reshape(shape))
