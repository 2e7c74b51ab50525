"""One row of a request's tensors, and what its table says becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.trtllm.tensors import CORE, INPUTS, Input

Tensors = Mapping[str, np.ndarray]


class Row:
    """One row's tensors, without the batch's dimension."""

    def __init__(self, model: str, tensors: Tensors):
        self.tensors = tensors
        self.is_core = model == CORE
        self.table: Mapping[str, Input] = INPUTS[model]

    def one(self, name: str, default: Any = None) -> Any:
        """The value of a tensor that has one."""
        value = self.tensors.get(name)
        if value is None:
            return default
        if value.size != 1:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: has {value.size} elements a row; must have 1")
        return plain(name, value.reshape(-1)[0])

    def all(self, name: str) -> list[Any]:
        return [plain(name, value) for value in self.tensors.get(name, np.empty(0)).reshape(-1)]

    def words(self, name: str) -> list[str]:
        return [word for word in self.all(name) if word]


def plain(name: str, value: Any) -> Any:
    """A number, a bool or a string. A float is the shortest that has these 32 bits, as its sender will have written."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: byte {error.start} is not valid UTF-8; send UTF-8 text"
            ) from None
    return float(str(value)) if isinstance(value, np.floating) else value.item() if hasattr(value, "item") else value


def refuse(row: Row) -> None:
    for name, value in row.tensors.items():
        asks_for_nothing = row.table[name].refused
        if asks_for_nothing and not asks_for_nothing(value):
            shown = value.reshape(-1)[0].item() if value.size == 1 and value.dtype != np.object_ else "..."
            raise invalid_argument(name, shown, "not supported; leave it out")


def parameters_of(row: Row) -> tuple[dict[str, Any], dict[str, str]]:
    """Sampling parameters by the engine's names, and what the client calls each."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name in row.tensors:
        spec = row.table[name]
        if spec.parameter is None:
            continue
        if spec.parameter in names:
            both = ", ".join(sorted((name, names[spec.parameter])))
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{both}: two names of one thing are given; give one")
        names[spec.parameter] = name
        value = row.one(name) if spec.dims == (1,) else row.words(name)
        if value != []:
            values[spec.parameter] = value
    if "lora_name" in values:
        values["lora_name"] = str(values["lora_name"])  # a task's id is the name of the adapter that serves it
    return values, names


def use_client_names(message: str, names: Mapping[str, str]) -> str:
    """The engine's error, with the names that the client knows of its parameters."""
    for parameter, name in names.items():
        message = message.replace(f" {parameter}=", f" {name}=", 1)
    return message
