"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.api.errors import GENERATES_NO_TEXT, LORA_NOT_ENABLED, ONLY_EMBEDS
from paged_client.discovery import listed
from paged_client.types import PagedError

# HTTP status by the error class of PagedError; 500 for all others.
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 503,  # the server does not have a model that the gateway knows
    "UNAVAILABLE": 503,
    "CANCELLED": 499,  # cancelled by a `stop_request`; OpenAI's clients do not retry this status
    "RESOURCE_EXHAUSTED": 503,
    "DEADLINE_EXCEEDED": 504,
}
NO_SUCH_MODEL = "model_not_found"  # error code of OpenAI's API
_FIELD = re.compile(r"\w+(?=[=:\[])")
_CONTEXT_LENGTH = re.compile(r"max_model_len(?:=| is )(\d+)")


class ApiError(Exception):
    """An error response. `param` is the invalid field, `code` the error code of OpenAI's API."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def no_such_model(name: str, served: Sequence[str] = (), reason: str = "") -> ApiError:
    """Return the error for an unknown model. `served` are the names of the models, if they are known."""
    message = f"model={name[:80]!r}: neither a model nor an adapter"
    message += f" ({reason})" if reason else ""
    message += f"; choose {listed(served)}" if served else ""
    return ApiError(404, message, param="model", code=NO_SUCH_MODEL)


def from_engine(error: PagedError, names: Mapping[str, str]) -> ApiError:
    """Return the error response for an error of the engine.

    Args:
        names: the request's field names by the engine's, where they differ; under `lora_name`, the name of the model
            that the request gave.
    """
    status = _STATUS.get(error.code, 500)
    message, param = error.message, None
    field = _FIELD.match(message)
    if status == 400 and "lora_name" in names and ((field and field[0] == "lora_name") or message.startswith("LoRA ")):
        # The client may not know what an adapter is: that the server has none does not explain the error.
        return no_such_model(names["lora_name"], reason="" if LORA_NOT_ENABLED in message else message)
    if status == 400 and GENERATES_NO_TEXT in message:
        return ApiError(400, f"model: {GENERATES_NO_TEXT}; use /classify, /score or /rerank", param="model")
    if status == 400 and ONLY_EMBEDS in message:
        return ApiError(400, f"model: {ONLY_EMBEDS}; use /v1/embeddings", param="model")
    if status == 400 and field:
        param = names.get(field[0], field[0])
        if message[field.end()] == "[":  # an element of the field
            message = param + message[field.end() :]
        elif param != field[0]:
            message = f"{param}: {message}"
    code = error.code.lower()
    if status == 400 and (length := _CONTEXT_LENGTH.search(message)):
        # Clients look for this code or these words, to shorten a conversation or to choose another model.
        code = "context_length_exceeded"
        message += f". This model's maximum context length is {length[1]} tokens."
    return ApiError(status, message, param=param, code=code)
