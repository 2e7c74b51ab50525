"""Single values out of input tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_backend.api import strict_json
from paged_backend.api.errors import ErrorCode, RequestError

Tensors = Mapping[str, np.ndarray]


def scalar(tensors: Tensors, name: str) -> Any:
    """Return the only element of a tensor; None if the tensor is missing."""
    tensor = tensors.get(name)
    if tensor is None:
        return None
    if tensor.size != 1:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: has {tensor.size} elements; must have 1")
    return tensor.reshape(-1)[0]


def boolean(tensors: Tensors, name: str, default: bool = False) -> bool:
    value = scalar(tensors, name)
    return default if value is None else bool(value)


def text(tensors: Tensors, name: str) -> str | None:
    value = scalar(tensors, name)
    return None if value is None else decode(name, value)


def decode(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"{name}: byte {error.start} is not valid UTF-8; send UTF-8 text"
        ) from None


def parse_json(name: str, text: str) -> Any:
    """Parse the JSON of an input. Raises RequestError if it is invalid."""
    try:
        return strict_json.parse(text)
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: not valid JSON: {error}") from None
