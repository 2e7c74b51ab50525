"""Fake gRPC and HTTP endpoints for the client, which follow a script in the sampling parameters.

`say` is the list of output texts. After them, `fail` sends an error message, `cut` ends the stream without a finish
reason, `hold` sends nothing until the client disconnects, and `vanish` breaks the connection. Otherwise the last text
has a finish reason (`reason`) and optionally a `receipt`. The first text comes with `prompt_token_ids`, if there are
any. A pool map request returns the next one of `FakeServerState.maps`.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor

WAIT = 30  # time limit for an expected event, in seconds


@dataclass
class FakeServerState:
    """The requests and scripts of a fake server, and whether the client of a held stream has disconnected."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    maps: list[str] = field(default_factory=list)  # the last one is repeated
    adapters: str = "[]"
    model_info: str = "{}"
    models: dict[str, list[str]] = field(default_factory=lambda: {"paged_llm": ["text_input", "pool_map"]})  # inputs
    by_model: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> input -> script, over gRPC
    asked_models: list[str] = field(default_factory=list)  # the model of each request over gRPC
    index_status: int = 200  # of the list of models over HTTP
    scripted_response: Any = field(default_factory=dict)  # script of a recording server (gateway.py)
    sampling: list[dict[str, Any]] = field(default_factory=list)  # sampling parameters of its requests

    def script(self, inputs: dict[str, Any], request_id: str) -> dict[str, Any]:
        self.requests.append({**inputs, "request_id": request_id})
        self.asked.set()
        if "pool_map" in inputs:
            text = self.maps.pop(0) if len(self.maps) > 1 else self.maps[0]
            return {"fail": text, "say": []} if text.startswith("UNAVAILABLE") else {"map": text}
        if "adapters" in inputs:
            return {"adapters": self.adapters}
        if "model_info" in inputs:
            return {"info": self.model_info}
        if "stop_request" in inputs:
            return {"stopped": len(self.requests)}
        return json.loads(inputs["sampling_parameters"])


def pieces(script: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the responses with text, as outputs by name."""
    if "map" in script:
        yield {"pool_map": script["map"]}
        return
    if "adapters" in script:
        yield {"adapters": script["adapters"]}
        return
    if "info" in script:
        yield {"model_info": script["info"]}
        return
    if "stopped" in script:
        yield {"num_stopped": script["stopped"]}
        return
    say = script.get("say", ["ok"])
    ends = not script.keys() & {"fail", "cut", "hold", "vanish"}
    for number, text in enumerate(say, 1):
        last = ends and number == len(say)
        reason = script.get("reason", "stop") if last else "None"
        receipt = {"receipt": script["receipt"]} if last and "receipt" in script else {}

        first = {"prompt_token_ids": script["prompt_token_ids"]} if number == 1 and "prompt_token_ids" in script else {}
        counts = {"num_input_tokens": 7, "num_output_tokens": 2}
        yield {"text_output": text, "finish_reason": reason, **counts, **receipt, **first}


class GrpcService(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, seen: FakeServerState) -> None:
        self.seen = seen
        self.server: grpc.Server | None = None

    def ModelStreamInfer(self, request_iterator, context):
        request = next(request_iterator)
        if request.model_name not in self.seen.models:
            yield rejection(f"Request for unknown model: '{request.model_name}' is not found")
            return
        inputs = grpc_inputs(request)
        self.seen.asked_models.append(request.model_name)
        own = (script for name, script in self.seen.by_model.get(request.model_name, {}).items() if name in inputs)
        script = next(own, None) or self.seen.script(inputs, request.id)
        # Before the first response: a call that is cancelled while it sends one does not return to this function.
        if "hold" in script and not context.add_callback(self.seen.left.set):
            self.seen.left.set()
        for outputs in pieces(script):
            yield service_pb2.ModelStreamInferResponse(infer_response=grpc_response(outputs))
        if "fail" in script:
            yield rejection(script["fail"])
        if "hold" in script:
            self.seen.left.wait(WAIT)
        if "vanish" in script:
            self.server.stop(grace=0).wait(WAIT)

    def RepositoryIndex(self, request, context):
        models = [service_pb2.RepositoryIndexResponse.ModelIndex(name=name) for name in self.seen.models]
        return service_pb2.RepositoryIndexResponse(models=models)

    def ModelMetadata(self, request, context):
        tensors = [service_pb2.ModelMetadataResponse.TensorMetadata(name=one) for one in self.seen.models[request.name]]
        return service_pb2.ModelMetadataResponse(name=request.name, inputs=tensors)


def rejection(message: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=message)


_DECODE = {
    "BYTES": lambda raw: deserialize_bytes_tensor(raw)[0].decode(),
    "BOOL": lambda raw: struct.unpack("?", raw)[0],
    "INT32": lambda raw: np.frombuffer(raw, np.int32).tolist(),
}


def grpc_inputs(request: Any) -> dict[str, Any]:
    inputs = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        inputs[tensor.name] = _DECODE[tensor.datatype](raw)
        assert list(tensor.shape) == [len(inputs[tensor.name]) if tensor.datatype == "INT32" else 1]
    return inputs


def grpc_response(outputs: dict[str, Any]) -> Any:
    response = service_pb2.ModelInferResponse(model_name="paged_llm")
    for name, value in outputs.items():
        if isinstance(value, list):
            response.outputs.add(name=name, datatype="INT32", shape=[len(value)])
            response.raw_output_contents.append(np.array(value, np.int32).tobytes())
            continue
        is_utf8_text = isinstance(value, str)
        kind = "BYTES" if is_utf8_text else "FP32" if isinstance(value, float) else "UINT32"
        response.outputs.add(name=name, datatype=kind, shape=[1])
        data = (
            value.encode() if is_utf8_text else np.array(value, np.float32 if kind == "FP32" else np.uint32).tobytes()
        )
        response.raw_output_contents.append(struct.pack("<I", len(data)) + data if is_utf8_text else data)
    return response


class HttpHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: FakeServerState  # attribute of the subclass that `http_server` makes

    def do_POST(self) -> None:
        inputs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v2/repository/index":
            index = [{"name": name, "version": "1", "state": "READY"} for name in self.seen.models]
            return self.whole(self.seen.index_status, "application/json", json.dumps(index))
        if self.path.removeprefix("/v2/models/").removesuffix("/generate_stream") not in self.seen.models:
            return self.whole(404, "application/json", '{"error":"Request for unknown model: is not found"}')
        script = self.seen.script(inputs, inputs.pop("id", ""))
        if "fail" in script and not script.get("say", ["ok"]):
            return self.whole(400, "text/event-stream", f"data: {json.dumps({'error': script['fail']})}\n\n")
        try:
            self.stream(script)
        except ConnectionError:
            self.close_connection = True
            self.seen.left.set()

    def do_GET(self) -> None:
        inputs = [{"name": name} for name in self.seen.models[self.path.removeprefix("/v2/models/")]]
        self.whole(200, "application/json", json.dumps({"inputs": inputs}))

    def whole(self, status: int, kind: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def stream(self, script: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for outputs in pieces(script):
            self.event(outputs)
        if "fail" in script:
            self.event({"error": script["fail"]})
        if "hold" in script:
            self.connection.settimeout(WAIT)
            if not self.connection.recv(1):
                self.seen.left.set()
        if script.keys() & {"hold", "vanish"}:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def event(self, data: dict[str, Any]) -> None:
        body = f"data: {json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))

    def log_message(self, *args: Any) -> None:
        """Keep the test output clean."""


class HttpServer(ThreadingHTTPServer):
    request_queue_size = 256  # simultaneous connections


@contextmanager
def grpc_server(port: int = 0) -> Iterator[FakeServerState]:
    """Run a gRPC server at this port; 0 chooses a free one."""
    seen = FakeServerState()
    service = GrpcService(seen)
    unlimited = [("grpc.max_receive_message_length", -1)]
    service.server = server = grpc.server(ThreadPoolExecutor(32), options=unlimited)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    seen.url = f"localhost:{server.add_insecure_port(f'localhost:{port}')}"
    server.start()
    try:
        yield seen
    finally:
        server.stop(grace=0).wait(WAIT)


@contextmanager
def http_server() -> Iterator[FakeServerState]:
    seen = FakeServerState()
    server = HttpServer(("localhost", 0), type("Handler", (HttpHandler,), {"seen": seen}))
    seen.url = f"localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join(WAIT)
        server.server_close()


SERVERS = {"grpc": grpc_server, "http": http_server}
