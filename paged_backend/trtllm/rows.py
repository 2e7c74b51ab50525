"""One row of a request's tensors, handled as its tensor table says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.trtllm.tensors import CORE, INPUTS, Input

Tensors = Mapping[str, np.ndarray]


class Row:
    """The tensors of one row, without the batch dimension."""

    def __init__(self, model: str, tensors: Tensors):
        self.tensors = tensors
        self.is_core = model == CORE
        self.table: Mapping[str, Input] = INPUTS[model]

    def one(self, name: str, default: Any = None) -> Any:
        """Return the only element of a tensor; `default` if the tensor is missing."""
        value = self.tensors.get(name)
        if value is None:
            return default
        if value.size != 1:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{name}: has {value.size} elements per row; must have 1")
        return plain(name, value.reshape(-1)[0])

    def all(self, name: str) -> list[Any]:
        """Return all elements of a tensor; empty if it is missing."""
        return [plain(name, value) for value in self.tensors.get(name, np.empty(0)).reshape(-1)]

    def words(self, name: str) -> list[str]:
        """Return the elements of a string tensor that are not empty."""
        return [word for word in self.all(name) if word]


def plain(name: str, value: Any) -> Any:
    """Return an element as a Python number, bool or string.

    A float32 becomes the shortest decimal number that rounds to it, which is what the client will have written.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"{name}: byte {error.start} is not valid UTF-8; send UTF-8 text"
            ) from None
    return float(str(value)) if isinstance(value, np.floating) else value.item() if hasattr(value, "item") else value


def reject_unsupported(row: Row) -> None:
    """Raise RequestError for an unsupported input whose value would have an effect."""
    for name, value in row.tensors.items():
        is_neutral = row.table[name].unsupported
        if is_neutral and not is_neutral(value):
            shown = value.reshape(-1)[0].item() if value.size == 1 and value.dtype != np.object_ else "..."
            raise invalid_argument(name, shown, "not supported; leave it out")


def parameters_of(row: Row) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling parameters by the engine's names, and the client's name of each."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name in row.tensors:
        spec = row.table[name]
        if spec.parameter is None:
            continue
        if spec.parameter in names:
            both = ", ".join(sorted((name, names[spec.parameter])))
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{both}: two names of one parameter; give one of them")
        names[spec.parameter] = name
        value = row.one(name) if spec.dims == (1,) else row.words(name)
        if value != []:
            values[spec.parameter] = value
    if "lora_name" in values:
        values["lora_name"] = str(values["lora_name"])  # a LoRA task id is the name of an adapter
    return values, names


def use_client_names(message: str, names: Mapping[str, str]) -> str:
    """Return an error message of the engine with the parameters' names replaced by the client's."""
    for parameter, name in names.items():
        message = message.replace(f" {parameter}=", f" {name}=", 1)
    return message
