"""The request and response formats of the models in front of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.wire.channel import Channel
from paged_backend.trtllm import llmapi, requests, responses
from paged_backend.trtllm.limits import DEFAULT_LIMITS, RelayLimits
from paged_backend.trtllm.rows import Tensors
from paged_backend.trtllm.tensors import LLMAPI

_IGNORED = "Streaming"  # a request parameter that TensorRT-LLM's own clients send and no model reads


class RowRequest(Protocol):
    """The engine's request for one row. An interface creates it and later gets it back with each response."""

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The engine's input tensors."""

    @property
    def renamed(self) -> dict[str, str]:
        """The client's tensor of each sampling parameter, for error messages."""


class Interface(Protocol):
    """The format of one model."""

    def read(self, tensors: Tensors) -> list[RowRequest]:
        """Return a RowRequest per row. Raises RequestError for invalid or unsupported input."""

    def write(self, row_request: Any, response: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the client's responses for one response of the engine."""

    def confirm_stop(self, channel: Channel) -> None:
        """Answer a stop request."""


class BatchInterface:
    """The format of `ensemble`, `tensorrt_llm_bls` and `tensorrt_llm`: batches of rows."""

    def __init__(self, name: str, streams: bool, limits: RelayLimits):
        self._name = name
        self._streams = streams
        self._limits = limits

    def read(self, tensors: Tensors) -> list[RowRequest]:
        rows = requests.read(self._name, tensors, self._limits)
        if not self._streams:
            requests.check_one_response(rows)
        return list(rows)

    def write(
        self, row_request: requests.RowRequest, response: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        return responses.write(row_request, response)

    def confirm_stop(self, channel: Channel) -> None:
        channel.send({}, final=True)


class LlmApiInterface:
    """The format of `llmapi`: one prompt per request."""

    def __init__(self, streams: bool):
        self._streams = streams

    def read(self, tensors: Tensors) -> list[RowRequest]:
        return list(llmapi.read(tensors, streams=self._streams))

    def write(
        self, row_request: llmapi.RowRequest, response: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        return llmapi.write(row_request, response)

    def confirm_stop(self, channel: Channel) -> None:
        channel.fail(RequestError(ErrorCode.CANCELLED, "the requests with this id are being stopped"))


def engine_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request parameters to pass on to the engine."""
    return {name: value for name, value in given.items() if name != _IGNORED}


def create_interface(name: str, *, streams: bool = True, limits: RelayLimits = DEFAULT_LIMITS) -> Interface:
    """Return the format of a model. streams: whether it may send several responses (`decoupled`)."""
    return LlmApiInterface(streams) if name == LLMAPI else BatchInterface(name, streams, limits)
