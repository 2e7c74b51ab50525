"""Requests whose results are computed from prompts: one engine request for each of several inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from paged_client.async_client import AsyncClient
from paged_client.openai.concurrency import gather_or_cancel
from paged_client.openai.errors import ApiError, from_engine
from paged_client.openai.schema import Body, Flag, Integer, StrictModel
from paged_client.types import Classification, Embedding, PagedError

MAX_CONCURRENT_INPUTS = 64  # maximum for one request
_PREFIXES = ("embedding_request.", "classification_request.", "pooling_params.")

ResultT = TypeVar("ResultT")


class SamplingFields(StrictModel):
    """The sampling parameters that apply, except the adapter, which is the `model` here. None: the engine's default."""

    priority: Integer | None = None
    cache_salt: str | None = None
    timeout_ms: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: Flag | None = None


class PoolingBody(SamplingFields, Body, Generic[ResultT]):
    """The base class of the bodies of such requests."""

    model: str | None = None  # None: the server's model

    @property
    def list_field(self) -> str:
        """The field that holds the inputs."""
        return "input"

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The arguments of the client's method for each input."""
        raise NotImplementedError

    async def ask(self, client: AsyncClient, arguments: Mapping[str, Any]) -> ResultT:
        """Return the result for one input."""
        raise NotImplementedError

    def response(self, results: Sequence[ResultT], request_id: str, model: str) -> dict[str, Any]:
        """Return the response body. model: the name of the model that computed the results."""
        raise NotImplementedError

    @property
    def sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {name: value for name, value in given.items() if value is not None}

    def names(self, index: int) -> dict[str, str]:
        """Return the names of the fields of an input, by the engine's names."""
        return dict.fromkeys(("input", "prompt_tokens", "text_input", "messages"), self.element(self.list_field, index))

    def element(self, field: str, index: int) -> str:
        """Return the name of an input in `field`, which is an element if the field is a list of inputs."""
        given = getattr(self, field)
        is_one = isinstance(given, str) or field == "messages" or not given or isinstance(given[0], int)
        return field if is_one else f"{field}[{index}]"


def usage(results: Sequence[Embedding | Classification]) -> dict[str, int]:
    """Return the usage in a response body. There are no output tokens."""
    tokens = sum(result.num_input_tokens for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


async def ask_all(
    client: AsyncClient, body: PoolingBody[ResultT], adapter: str | None, trace_context: Mapping[str, str]
) -> list[ResultT]:
    """Return the results of all inputs, in order. Raises ApiError if one fails, which cancels the others.

    trace_context: the headers `traceparent` and `tracestate` of the request.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_INPUTS)
    sampling = {**body.sampling, **({} if adapter is None else {"lora_name": adapter}), **trace_context}

    async def ask(index: int, arguments: Mapping[str, Any]) -> ResultT:
        async with slots:
            try:
                return await body.ask(client, {**arguments, **sampling})
            except PagedError as error:
                raise _api_error(error, body.names(index), adapter) from None

    return await gather_or_cancel(ask(index, call) for index, call in enumerate(body.calls))


def _api_error(error: PagedError, names: Mapping[str, str], adapter: str | None) -> ApiError:
    message = error.message
    for prefix in _PREFIXES:
        message = message.removeprefix(prefix)
    return from_engine(
        PagedError(error.code, message), {**names, **({} if adapter is None else {"lora_name": adapter})}
    )
