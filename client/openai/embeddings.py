"""OpenAI's requests for embeddings: each of their inputs is a request of its own to the engine."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

from client.openai.concurrency import gather_or_cancel
from client.openai.errors import ApiError, from_engine
from client.openai.schema import Body, IgnoredFields, ListOf, StrictModel, split_inputs
from client.openai.servers import Servers
from client.types import Embedding, PagedError

AT_ONCE = 64  # inputs of a request that the engine is asked for at the same time


class SamplingFields(StrictModel):
    """The sampling parameters that have a meaning for an embedding, but the adapter, which is a model here. None: the
    engine's default."""

    priority: int | None = None
    cache_salt: str | None = None
    timeout_ms: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(SamplingFields, IgnoredFields, Body):
    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Text or token ids, one for each embedding."""
        return split_inputs(self.input)

    @property
    def sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in given.items() if value is not None}


def answer(request: EmbeddingRequest, found: Sequence[Embedding]) -> dict[str, Any]:
    tokens = sum(one.num_input_tokens for one in found)
    return {
        "object": "list",
        "model": request.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(one.values, request.encoding_format)}
            for index, one in enumerate(found)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def embed_all(client: Servers, request: EmbeddingRequest, adapter: str | None) -> list[Embedding]:
    """In the order of the inputs. adapter: that they go through. Raises ApiError where the engine refuses any of them,
    which cancels the others."""
    places = asyncio.Semaphore(AT_ONCE)
    sampling = request.sampling | ({} if adapter is None else {"lora_name": adapter})

    async def embed(name: str, text: str | list[int]) -> Embedding:
        async with places:
            try:
                return await client.embed(text, dimensions=request.dimensions, **sampling)
            except PagedError as error:
                raise _refusal(error, name, adapter) from None

    inputs = request.inputs
    names = ["input"] if len(inputs) == 1 else [f"input[{index}]" for index in range(len(inputs))]
    return await gather_or_cancel(embed(*one) for one in zip(names, inputs, strict=True))


def _refusal(error: PagedError, name: str, adapter: str | None) -> ApiError:
    """name: of the input that the engine refuses."""
    message = error.message.removeprefix("embedding_request.").removeprefix("pooling_params.")
    names = dict.fromkeys(("input", "prompt_tokens", "text_input"), name)
    return from_engine(PagedError(error.code, message), names | ({} if adapter is None else {"lora_name": adapter}))


def _encoded(values: Sequence[float], encoding: str | None) -> list[float] | str:
    """base64: the numbers as float32, little-endian."""
    if encoding != "base64":
        return list(values)
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
