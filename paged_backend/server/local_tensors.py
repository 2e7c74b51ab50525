"""Tensors as JSON values, in the frames of the local socket (utils/local_socket.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_backend.server.tensors import NUMPY_TYPES, TensorSpec
from paged_backend.utils.local_socket import FrameError


def write_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return tensors as JSON values. Bytes that are not valid UTF-8 become lone surrogates."""
    return {
        name: [_text(one) for one in values.tolist()] if values.dtype == np.object_ else values.tolist()
        for name, values in tensors.items()
    }


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


def read_tensors(values: Any, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
    """Return one-dimensional tensors with the types of `specs`. Raises FrameError."""
    try:
        return {name: _tensor(each, specs[name]) for name, each in values.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"invalid tensors: {type(error).__name__}: {error}") from None


def _tensor(values: list[Any], spec: TensorSpec) -> np.ndarray:
    if spec.data_type == "TYPE_STRING":
        values = [one.encode(errors="surrogateescape") for one in values]
    tensor = np.array(values, NUMPY_TYPES[spec.data_type])
    if tensor.ndim != 1:
        raise FrameError(f"a tensor has {tensor.ndim} dimensions; must have 1")
    return tensor
