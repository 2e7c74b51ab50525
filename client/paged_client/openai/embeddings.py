"""The /v1/embeddings route: sends one engine request for each input."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paged_client.openai.concurrency import gather_or_cancel
from paged_client.openai.errors import ApiError, from_engine
from paged_client.openai.schema import Body, Flag, IgnoredFields, Integer, ListOf, StrictModel, split_inputs
from paged_client.openai.servers import Servers
from paged_client.types import Embedding, PagedError

MAX_CONCURRENT_INPUTS = 64  # maximum for one request


class SamplingFields(StrictModel):
    """The sampling parameters that apply to embeddings, except the adapter, which is the `model` here.

    None is the engine's default.
    """

    priority: Integer | None = None
    cache_salt: str | None = None
    timeout_ms: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: Flag | None = None


class EmbeddingRequest(SamplingFields, IgnoredFields, Body):
    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs, each text or token ids."""
        return split_inputs(self.input)

    @property
    def sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in given.items() if value is not None}


def response(request: EmbeddingRequest, embeddings: Sequence[Embedding]) -> dict[str, Any]:
    """Return the response body."""
    tokens = sum(embedding.num_input_tokens for embedding in embeddings)
    return {
        "object": "list",
        "model": request.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encode(embedding.values, request.encoding_format)}
            for index, embedding in enumerate(embeddings)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def embed_all(
    client: Servers, request: EmbeddingRequest, adapter: str | None, trace_context: Mapping[str, str]
) -> list[Embedding]:
    """Return the embeddings of all inputs, in order. Raises ApiError if one fails, which cancels the others.

    trace_context: the headers `traceparent` and `tracestate` of the request.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_INPUTS)
    sampling = {**request.sampling, **({} if adapter is None else {"lora_name": adapter}), **trace_context}

    async def embed(name: str, text: str | list[int]) -> Embedding:
        async with slots:
            try:
                return await client.embed(text, dimensions=request.dimensions, **sampling)
            except PagedError as error:
                raise _api_error(error, name, adapter) from None

    inputs = request.inputs
    names = ["input"] if len(inputs) == 1 else [f"input[{index}]" for index in range(len(inputs))]
    return await gather_or_cancel(embed(*one) for one in zip(names, inputs, strict=True))


def _api_error(error: PagedError, name: str, adapter: str | None) -> ApiError:
    """Return the error response for the input field `name`."""
    message = error.message.removeprefix("embedding_request.").removeprefix("pooling_params.")
    names = dict.fromkeys(("input", "prompt_tokens", "text_input"), name)
    return from_engine(PagedError(error.code, message), names | ({} if adapter is None else {"lora_name": adapter}))


def _encode(values: Sequence[float], encoding: str | None) -> list[float] | str:
    """Encode an embedding: as a list or, for "base64", as little-endian float32."""
    if encoding != "base64":
        return list(values)
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
