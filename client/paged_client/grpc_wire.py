"""The gRPC encoding of requests, responses and errors: `ModelStreamInfer` of the stubs in tritonclient.

We use the stubs because `InferenceServerClient` has one stream at a time with a thread for each, and keeps its reader
waiting if the server ends a stream without an error. Here each request is one call. Its sending side is closed after
the request, so that the server ends the call after the last response.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from paged_client.connection_errors import unreachable
from paged_client.types import PagedError
from paged_client.wire import INPUTS, REQUEST_PARAMETERS, Fields, Value, Values

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # The default backoff grows to two minutes, in which a client does not notice that its server has restarted.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Pings, so that calls of a server that is frozen or cut off end. A server permits one every 300 s without data
    # (--grpc-http2-min-recv-ping-interval-without-data), and closes the connection after some more frequent ones.
    # The timeout also limits how long a server that is cut off may take to acknowledge a request.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit; the default ends the pings after two
)
_NOT_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution", "Trying to connect")
# What gRPC reports if the connection of an open call breaks: each system and each way to end has another text.
_BROKEN = (
    *("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "Connection timed out", "ping timeout"),
    "Cancelling all calls",  # from a server that ends in order
)
_UNKNOWN_MODEL = "Request for unknown model"
_DATATYPES = {"TYPE_STRING": "BYTES", "TYPE_BOOL": "BOOL", "TYPE_INT32": "INT32"}


def metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return headers as gRPC metadata, with names in lower case."""
    return tuple((name.lower(), value) for name, value in headers.items())


def infer_request(model: str, values: Values, request_id: str) -> Any:
    """Return the ModelInferRequest of a call."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in values.items():
        if name in REQUEST_PARAMETERS:
            _set_parameter(request.parameters[name], value)
            continue
        count = len(value) if isinstance(value, list) else 1
        request.inputs.add(name=name, datatype=_DATATYPES[INPUTS[name][0]], shape=[count])
        request.raw_input_contents.append(_elements(value))
    return request


def _set_parameter(parameter: Any, value: Value) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    else:
        parameter.string_param = value


def _elements(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("?", value)
    if isinstance(value, list):
        return struct.pack(f"<{len(value)}i", *value)
    assert isinstance(value, str), value
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def read_fields(response: Any) -> Fields:
    """Return the outputs of a ModelStreamInferResponse by name. Raises PagedError if it is an error.

    The error class is parsed from the message. Triton can add a gRPC status (`triton_grpc_error` in the metadata), but
    server 2.51 then logs an internal error whenever such a client disconnects, and has crashed after one. After an
    error, read the call to its end: cancelling or dropping it earlier can keep that server from exiting.
    """
    if response.error_message:
        code = "NOT_FOUND" if response.error_message.startswith(_UNKNOWN_MODEL) else "UNKNOWN"
        raise PagedError.parse(response.error_message, code)
    answer = response.infer_response
    return {
        tensor.name: _read_elements(tensor.datatype, raw)
        for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


_NUMBERS = {"UINT32": "I", "INT32": "i", "FP32": "f"}


def _read_elements(datatype: str, raw: bytes) -> list[str | int | float]:
    """Decode a tensor with `struct`: for a few elements NumPy takes longer than the rest of a response."""
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(raw) // 4}{_NUMBERS[datatype]}", raw))
    texts, place = [], 0
    while place < len(raw):
        start = place + 4
        place = start + int.from_bytes(raw[place:start], "little")
        texts.append(raw[start:place].decode())
    return texts  # type: ignore[return-value]


def rpc_error(error: grpc.RpcError, target: str) -> PagedError:
    """Return the PagedError of a gRPC error: the class in its message or, without one, the gRPC status.

    An `UnreachableError` that names `target`, if no connection could be made. The message of a connection that has
    broken names it too.
    """
    details = error.details() or ""
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        if any(text in details for text in _NOT_CONNECTED):
            return unreachable(target, "grpc", details)
        if any(text in details for text in _BROKEN):
            details = f"the server at {target} ended or cannot be reached any more, while it was answering: {details}"
            return PagedError("UNAVAILABLE", details)
    return PagedError.parse(details, error.code().name)
