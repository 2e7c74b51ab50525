"""The asyncio client: the same methods, requests and errors as the synchronous one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from types import TracebackType

from paged_client.addresses import check_headers
from paged_client.async_conversation import AsyncConversation
from paged_client.async_stream import AsyncStream, AsyncTransport
from paged_client.pooling import classification_values, embedding_values, read_classification, read_embedding
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import Adapter, Classification, Completion, Embedding, ModelInfo, PagedError, PoolMap
from paged_client.wire import (
    ADAPTERS_REQUEST,
    MODEL_INFO_REQUEST,
    POOL_MAP_REQUEST,
    STOP_REQUEST,
    Fields,
    Message,
    Prompt,
    Values,
    check_request_id,
    check_timeout,
    may_stream,
    read_adapters,
    read_model_info,
    read_num_stopped,
    read_pool_map,
    request_values,
)


def _transport(url: str, model: str, protocol: str, headers: Mapping[str, str]) -> AsyncTransport:
    # Imported on use: grpc and aiohttp take longer to import than the rest of the client.
    if protocol == "grpc":
        from paged_client.async_grpc import GrpcTransport

        return GrpcTransport(url, model, headers)
    from paged_client.async_http import HttpTransport

    return HttpTransport(url, model, headers)


class AsyncClient:
    """A client of one served model. It belongs to one event loop and takes any number of concurrent requests.

    Args:
        url, model, protocol, headers: as for Client.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str = "paged_llm",
        protocol: str = "grpc",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if protocol not in DEFAULT_URLS:
            raise ValueError(f"protocol={protocol!r}: must be one of {', '.join(DEFAULT_URLS)}")
        self._transport = _transport(url or DEFAULT_URLS[protocol], model, protocol, check_headers(headers or {}))

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Completion:
        """Generate a completion and return it when it is complete; see Client.generate."""
        values = request_values(prompt, messages, sampling, stream=self._transport.must_stream and may_stream(sampling))
        async with self._open(values, request_id, timeout) as stream:
            async for _ in stream:
                pass
            completion = stream.completion
            assert completion is not None  # a stream that failed has raised
            return completion

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> AsyncStream:
        """Return the output of a request as a stream; see Client.stream. The request is sent when it is iterated."""
        return self._open(request_values(prompt, messages, sampling, stream=True), request_id, timeout)

    def conversation(self, **sampling: object) -> AsyncConversation:
        """Return a new session; see Client.conversation."""
        return AsyncConversation(self, sampling)

    async def pool_map(self, *, timeout: float | None = None) -> PoolMap:
        """See Client.pool_map."""
        return read_pool_map(await self._ask(POOL_MAP_REQUEST, "", timeout))

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """See Client.cancel."""
        return read_num_stopped(await self._ask(STOP_REQUEST, check_request_id(request_id), timeout))

    async def adapters(self, *, timeout: float | None = None) -> tuple[Adapter, ...]:
        """See Client.adapters."""
        return read_adapters(await self._ask(ADAPTERS_REQUEST, "", timeout))

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """See Client.model_info."""
        return read_model_info(await self._ask(MODEL_INFO_REQUEST, "", timeout))

    async def embed(
        self,
        input: str | Sequence[int],
        *,
        dimensions: int | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Embedding:
        """See Client.embed."""
        return read_embedding(await self._ask(embedding_values(input, dimensions, sampling), request_id, timeout))

    async def classify(
        self,
        input: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        query: str | None = None,
        document: str | None = None,
        use_activation: bool = True,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: object,
    ) -> Classification:
        """See Client.classify."""
        values = classification_values(input, messages, query, document, use_activation, sampling)
        return read_classification(await self._ask(values, request_id, timeout))

    async def _ask(self, values: Values, request_id: str, timeout: float | None) -> Fields | None:
        responses = self._transport.open(values, request_id, check_timeout(timeout))
        try:
            response = await responses.next()
            with suppress(PagedError):
                await responses.next()  # read the end, as Client._ask does
        finally:
            responses.cancel()
        return response

    def with_transport(self, wrap: Callable[[AsyncTransport], AsyncTransport]) -> AsyncClient:
        """Return a client of the same server whose transport is this client's, wrapped by `wrap`."""
        client = copy(self)
        client._transport = wrap(self._transport)
        return client

    def _open(self, values: Values, request_id: str, timeout: float | None) -> AsyncStream:
        return AsyncStream(self._transport.open(values, request_id, check_timeout(timeout)))

    async def close(self) -> None:
        """Close the connection. Open streams end."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
