"""Clients that execute plans and record the responses, over gRPC and over raw HTTP sockets, with asyncio."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.stress.history import History
from tests.support.stress.plans import DISCONNECTS, Plan
from tests.support.stress.requests import MODEL, RETURN_FLAGS, as_list, split

TIMEOUT = 60.0  # seconds after which a missing response counts as lost


@dataclass(frozen=True)
class Response:
    tokens: list[list[int]]
    texts: list[str]
    offset: int | None  # of the first sample's first token in its text
    finish: list[str]
    error: str | None = None


class Wire(Protocol):
    """The connection of one request."""

    async def send(self, plan: Plan) -> None: ...

    async def receive(self) -> Response | None:
        """Return the next response, or None if the server has closed the stream properly."""

    def leave(self, fault: str) -> None: ...

    async def close(self) -> None: ...


class UnknownRequests(Exception):
    """The server has ended a stream improperly."""


class Clients:
    """Executes plans concurrently, in one event loop."""

    def __init__(self, http_port: int, grpc_url: str, history: History, *, timeout: float = TIMEOUT):
        self._http_port, self._grpc_url = http_port, grpc_url
        self._history = history
        self._timeout = timeout
        self._channels = [connect(grpc_url) for _ in range(4)]
        self._turn = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def play(self, plan: Plan) -> bool:
        """Execute a plan and record it. Return whether the response was an error. Never raises."""
        self._history.invoke(plan)
        wire = self._wire(plan)
        try:
            return await asyncio.wait_for(self._talk(plan, wire), self._timeout)
        except asyncio.TimeoutError:
            self._end(plan, "lost", why=f"no end within {self._timeout:.0f} s")
        except Exception as error:  # any failure of the server or the connection
            self._end(plan, "lost", why=f"{type(error).__name__}: {error}")
        finally:
            await wire.close()
        return False

    async def play_all(
        self, plans: Any, *, open: int, until: Callable[[], bool] = lambda: False, rest: float = 0.0
    ) -> None:
        """Execute plans, `open` at a time, until there are no more or `until` returns true.

        Args:
            rest: seconds that a client waits after an error before its next request.
        """

        async def some() -> None:
            for plan in plans:
                refused = await self.play(plan)
                if until():
                    return
                await asyncio.sleep(rest if refused else 0)

        plans = iter(plans)
        await asyncio.gather(*(some() for _ in range(open)))

    async def stop_request(self, id: str) -> None:
        """Cancel a request by its id, as another client would."""
        body = json.dumps({"id": id, "stop_request": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        writer.write(_head("generate", len(body), close=True) + body)
        answer = await reader.read()
        writer.close()
        if b"num_stopped" not in answer:
            raise UnknownRequests(f"stop_request: {answer!r}")

    def _wire(self, plan: Plan) -> Wire:
        if plan.protocol == "http":
            return HttpWire(self._http_port)
        if plan.fault == "close":
            return GrpcWire(connect(self._grpc_url), own=True)
        self._turn += 1
        return GrpcWire(self._channels[self._turn % len(self._channels)])

    async def _talk(self, plan: Plan, wire: Wire) -> bool:
        await wire.send(plan)
        wants_to_go = plan.fault in (*DISCONNECTS, "stop_request")
        count, ended, failed, paused = 0, False, False, not plan.pause
        if wants_to_go and not plan.after:
            waiting = asyncio.ensure_future(wire.receive())
            await asyncio.wait([waiting], timeout=plan.delay)
            if not waiting.done():
                wants_to_go = False
                if await self._go(plan, wire):
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)
                    return False
            response = await waiting
        else:
            response = await wire.receive()
        while response is not None:
            note(self._history, plan.id, response)
            count += max(map(len, response.tokens), default=0)
            failed = failed or response.error is not None
            ended = ended or failed or bool(response.finish)
            if wants_to_go and count >= plan.after and not ended:
                wants_to_go = False
                if await self._go(plan, wire):
                    return False
            if not paused:
                paused = True
                await asyncio.sleep(plan.pause)
            response = await wire.receive()
        if not ended:
            raise UnknownRequests("the server closed it without an end")
        return failed

    async def _go(self, plan: Plan, wire: Wire) -> bool:
        """Inject the fault of a plan. Return whether the client has disconnected."""
        assert plan.fault
        if plan.fault == "stop_request":
            await self.stop_request(plan.id)
            return False
        wire.leave(plan.fault)
        self._end(plan, "left", fault=plan.fault)
        return True

    def _end(self, plan: Plan, how: str, **fields: Any) -> None:
        self._history.add("terminal", id=plan.id, how=how, **fields)


def note(history: History, id: str, response: Response) -> None:
    """Record one response."""
    some = any(response.tokens)
    if some or any(response.texts):
        at = response.offset if some else None
        history.add("tokens", id=id, tokens=response.tokens, texts=response.texts, at=at)
    if response.error is not None:
        history.add("terminal", id=id, how="error", error=response.error, bare=True)
    elif response.finish:
        history.add("terminal", id=id, how="finish", finish=response.finish, bare=not some)


# --- gRPC --------------------------------------------------------------------------------------------------------


def connect(url: str) -> Any:
    return grpc.aio.insecure_channel(url, options=[("grpc.use_local_subchannel_pool", 1)])


class GrpcWire:
    """A gRPC stream with one request.

    tritonserver 2.51 does not exit cleanly after a stream was cancelled on which its core had rejected a request (a
    tensor with a wrong name or type, an unknown model), whatever the model does. So all requests here are valid for the
    core, and only the engine rejects them. Streams that may use a model that is not loaded are never cancelled.
    """

    def __init__(self, channel: Any, *, own: bool = False):
        self._channel, self._own = channel, own
        self._call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        self._ended = False

    async def send(self, plan: Plan) -> None:
        await self._call.write(message_of(plan))

    async def receive(self) -> Response | None:
        if self._ended:
            await self._call.done_writing()
        reply = await self._call.read()
        if reply is grpc.aio.EOF:
            code = await self._call.code()
            if code != grpc.StatusCode.OK:
                raise UnknownRequests(f"{code}: {await self._call.details()}")
            return None
        response = read(reply)
        self._ended = bool(response.finish) or response.error is not None
        return response

    def leave(self, fault: str) -> None:
        if fault == "cancel":
            self._call.cancel()

    async def close(self) -> None:
        if self._own:
            await self._channel.close()
        elif not self._call.done():
            self._call.cancel()


def message_of(plan: Plan, model: str = MODEL) -> ModelInferRequest:
    message = ModelInferRequest(model_name=model, id=plan.id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in {
        "text_input": plan.request.text,
        "sampling_parameters": json.dumps(plan.sampling),
        "stream": True,
        **RETURN_FLAGS,
    }.items():
        kind = "BOOL" if isinstance(value, bool) else "BYTES"
        message.inputs.add(name=name, datatype=kind, shape=[1])
        raw = bytes([value]) if isinstance(value, bool) else struct.pack("<I", len(value)) + value.encode()
        message.raw_input_contents.append(raw)
    return message


def read(reply: ModelStreamInferResponse) -> Response:
    if reply.error_message:
        return Response([], [], None, [], reply.error_message)
    message = reply.infer_response
    raw = {output.name: content for output, content in zip(message.outputs, message.raw_output_contents, strict=True)}
    final = message.parameters["triton_final_response"].bool_param
    if not raw:  # an empty response of the server, if the last one of the model was not final
        return Response([], [], None, [])
    counts = struct.unpack(f"<{len(raw['num_output_tokens']) // 4}I", raw["num_output_tokens"])
    tokens = split(_integers(raw["token_ids"]), counts)
    finish = _strings(raw["finish_reason"])
    offsets = _integers(raw["text_offsets"])
    done = finish if final or "None" not in finish else []
    return Response(tokens, _strings(raw["text_output"]), offsets[0] if counts[0] else None, done)


def _integers(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def _strings(raw: bytes) -> list[str]:
    found, start = [], 0
    while start < len(raw):
        (length,) = struct.unpack_from("<I", raw, start)
        found.append(raw[start + 4 : start + 4 + length].decode())
        start += 4 + length
    return found


# --- HTTP --------------------------------------------------------------------------------------------------------


def _head(endpoint: str, length: int, *, close: bool = False) -> bytes:
    end = "Connection: close\r\n" if close else ""
    return f"POST /v2/models/{MODEL}/{endpoint} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n{end}\r\n".encode()


class HttpWire:
    """A socket with one request, which parses server-sent events as they arrive."""

    def __init__(self, port: int):
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._receive: Callable[[], Awaitable[Response | None]] = self._first
        self._rest = b""

    async def send(self, plan: Plan) -> None:
        body = {"text_input": plan.request.text, "id": plan.id, "stream": True, **RETURN_FLAGS}
        content = json.dumps(body | {"sampling_parameters": json.dumps(plan.sampling)}).encode()
        # A small buffer, so that the server notices a client that stops reading.
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 14)
        self._writer.write(_head("generate_stream", len(content)) + content)

    async def receive(self) -> Response | None:
        return await self._receive()

    def leave(self, fault: str) -> None:
        assert self._writer
        if fault == "rst":
            option = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        self._writer.transport.abort()  # closes the socket immediately

    async def close(self) -> None:
        if self._writer:
            self._writer.transport.abort()

    async def _first(self) -> Response | None:
        assert self._reader
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "transfer-encoding: chunked" in head:
            self._receive = self._next
            return await self._next()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length"))
        self._receive = self._nothing
        return _event(await self._reader.readexactly(length))

    async def _nothing(self) -> None:
        return None

    async def _next(self) -> Response | None:
        """Return the next event. The server writes each event as a chunk, but may split it."""
        assert self._reader
        while b"\n\n" not in self._rest:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            chunk = await self._reader.readexactly(size + 2)
            if not size:
                if self._rest.strip():
                    raise UnknownRequests(f"cut off: {self._rest!r}")
                return None
            self._rest += chunk[:-2]
        event, self._rest = self._rest.split(b"\n\n", 1)
        return _event(event.removeprefix(b"data: "))


def _event(text: bytes) -> Response:
    answer = json.loads(text)
    if "error" in answer:
        return Response([], [], None, [], answer["error"])
    counts = as_list(answer["num_output_tokens"])
    tokens = split(as_list(answer.get("token_ids", [])), counts)
    finish = as_list(answer["finish_reason"])
    offsets = as_list(answer.get("text_offsets", []))
    done = [] if "None" in finish else finish
    return Response(tokens, as_list(answer["text_output"]), offsets[0] if counts[0] else None, done)
