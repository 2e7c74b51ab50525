"""Requests, responses and errors as gRPC carries them: `ModelStreamInfer` of tritonclient's own stubs.

The stubs rather than `InferenceServerClient`: that one has a single stream at a time, a thread for each, and
leaves its reader waiting where the server ends a stream without an error. Here one call is one request: the
client's side is closed after it, so the server ends the call when the last response is out.
"""

from __future__ import annotations

import struct
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from client.types import PagedError
from client.wire import INPUTS, SEQUENCE, Fields, Value, Values

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's own back-off grows to two minutes: a client would not see that its server is back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_UNKNOWN_MODEL = "Request for unknown model"
_DATATYPES = {"TYPE_STRING": "BYTES", "TYPE_BOOL": "BOOL", "TYPE_INT32": "INT32"}


def check_target(url: str) -> str:
    """Raises ValueError for a web address: gRPC takes it for a host name and reports it as unreachable."""
    if "//" in url:
        raise ValueError(f"url={url!r}: gRPC takes HOST:PORT")
    return url


def infer_request(model: str, values: Values, request_id: str) -> Any:
    """The one ModelInferRequest of a call."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in values.items():
        if name in SEQUENCE:
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
    """One ModelStreamInferResponse -> its outputs. Raises PagedError where it is an error.

    The class comes from the text. Triton would add a gRPC status to calls with `triton_grpc_error` in their
    metadata, but as seen with server 2.51 each such call then leaves an internal error in its log when the
    client disconnects, and once the server crashed after one. After the error the call still has to end:
    read it to that end, for one that is cancelled there, or dropped, can keep that server from exiting.
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
    """By hand: numpy takes longer for a handful of elements than all the rest of a response."""
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(raw) // 4}{_NUMBERS[datatype]}", raw))
    texts, place = [], 0
    while place < len(raw):
        start = place + 4
        place = start + int.from_bytes(raw[place:start], "little")
        texts.append(raw[start:place].decode())
    return texts  # type: ignore[return-value]


def rpc_error(error: grpc.RpcError) -> PagedError:
    """The class that the message names; where it names none, the gRPC status."""
    return PagedError.parse(error.details() or "", error.code().name)
