"""The gRPC transport of the synchronous client: one channel, and one call for each request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from paged_client import grpc_wire
from paged_client.addresses import grpc_target
from paged_client.wire import Fields, Values


class GrpcTransport:
    must_stream = False

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._target = grpc_target(url)
        self._channel = grpc.insecure_channel(self._target, grpc_wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model
        self._metadata = grpc_wire.metadata(headers)

    def open(self, values: Values, request_id: str, timeout: float | None) -> GrpcResponses:
        request = grpc_wire.infer_request(self._model, values, request_id)
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout, metadata=self._metadata)
        return GrpcResponses(call, self._target)

    def close(self) -> None:
        self._channel.close()


class GrpcResponses:
    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target

    def next(self) -> Fields | None:
        try:
            response = next(self._call, None)
        except grpc.RpcError as error:
            raise grpc_wire.rpc_error(error, self._target) from None
        if response is None:
            return None
        if response.error_message:
            with suppress(grpc.RpcError):
                next(self._call, None)  # read the end of the call: see read_fields
        return grpc_wire.read_fields(response)

    def cancel(self) -> None:
        self._call.cancel()
