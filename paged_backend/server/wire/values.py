"""Single values out of input tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits

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


def parse_json(name: str, text: str, input_limits: InputLimits) -> Any:
    """Parse JSON. Raises RequestError if it is invalid, or longer than `max_json_chars`: parsing blocks admission."""
    input_limits.check("max_json_chars", name, len(text), "characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: not valid JSON: {error}") from None
