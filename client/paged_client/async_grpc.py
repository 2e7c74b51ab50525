"""The gRPC transport of the asyncio client: one channel, and one call for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from paged_client import grpc_wire
from paged_client.addresses import grpc_target
from paged_client.types import PagedError
from paged_client.wire import Fields, Values


class GrpcTransport:
    must_stream = False

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self.target = grpc_target(url)
        self._model = model
        self._metadata = grpc_wire.metadata(headers)
        self._channel: Any = None
        self._stub: Any = None
        self.is_closed = False

    def open(self, values: Values, request_id: str, timeout: float | None) -> GrpcResponses:
        return GrpcResponses(self, grpc_wire.infer_request(self._model, values, request_id), timeout)

    def call(self, request: Any, timeout: float | None) -> Any:
        self._connect()
        return self._stub.ModelStreamInfer(_once(request), timeout=timeout, metadata=self._metadata)

    def _connect(self) -> None:
        # Not in __init__: a channel belongs to the event loop that it is created in.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target, grpc_wire.CHANNEL_OPTIONS)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close()


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


class GrpcResponses:
    def __init__(self, transport: GrpcTransport, request: Any, timeout: float | None) -> None:
        self._transport = transport
        self._request = request
        self._timeout = timeout
        self._call: Any = None

    async def next(self) -> Fields | None:
        if self._call is None:
            self._call = self._transport.call(self._request, self._timeout)
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise grpc_wire.rpc_error(error, self._transport.target) from None
        except asyncio.CancelledError:
            if self._transport.is_closed:  # gRPC raises this for an open call, although its task was not cancelled
                raise PagedError("CANCELLED", "the client was closed") from None
            raise
        if response is grpc.aio.EOF:
            return None
        if response.error_message:
            with suppress(grpc.RpcError):
                await self._call.read()  # read the end of the call: see read_fields
        return grpc_wire.read_fields(response)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
