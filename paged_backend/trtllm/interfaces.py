"""The request and response formats of each model in front of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.channel import Channel
from paged_backend.trtllm import llmapi, replies, requests
from paged_backend.trtllm.limits import DEFAULT_LIMITS, RelayLimits
from paged_backend.trtllm.rows import Tensors
from paged_backend.trtllm.tensors import LLMAPI

Ask = requests.Ask | llmapi.Ask
_IGNORED = "Streaming"  # a request parameter that the LLM API's own client sends and no model reads


class Interface:
    """The format of `ensemble`, `tensorrt_llm_bls`, `tensorrt_llm` or `llmapi`."""

    def __init__(self, name: str, *, streams: bool = True, limits: RelayLimits = DEFAULT_LIMITS):
        """streams: whether the model may send several responses (`decoupled`)."""
        self._name = name
        self._limits = limits
        self._streams = streams

    def read(self, tensors: Tensors) -> list[Any]:
        """Return an Ask per row. Raises RequestError for invalid or unsupported input."""
        if self._name == LLMAPI:
            return list(llmapi.read(tensors, streams=self._streams))
        return list(requests.read(self._name, tensors, self._limits))

    def parameters(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request parameters to pass on to the engine."""
        return {name: value for name, value in given.items() if self._name != LLMAPI or name != _IGNORED}

    def write(self, ask: Ask, response: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the client's responses for one response of the engine."""
        return llmapi.write(ask, response) if isinstance(ask, llmapi.Ask) else replies.write(ask, response)

    def confirm_stop(self, channel: Channel) -> None:
        """Answer a request that only ends others."""
        if self._name == LLMAPI:
            channel.fail(RequestError(ErrorCode.CANCELLED, "the requests of this id were asked to end"))
        else:
            channel.send({}, final=True)
