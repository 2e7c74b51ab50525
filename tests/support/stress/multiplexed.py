"""Thousands of concurrent requests on a few gRPC streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.stress.clients import connect, message_of, note, read
from tests.support.stress.history import History
from tests.support.stress.plans import Plan


class MultiplexedClients:
    """Clients whose requests share streams, until all requests have ended or all streams are cancelled."""

    def __init__(self, grpc_url: str, history: History, model: str):
        self._grpc_url, self._history, self._model = grpc_url, history, model
        self._open: dict[str, Plan] = {}
        self._streams: list[tuple[Any, Any, asyncio.Future[None]]] = []

    async def open(self, plans: Iterable[Plan]) -> None:
        """Open another stream with these requests."""
        channel = connect(self._grpc_url)
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        self._streams.append((channel, call, asyncio.ensure_future(self._listen(call))))
        for plan in plans:
            plan = replace(plan, protocol="grpc")
            self._open[plan.id] = plan
            self._history.invoke(plan)
            await call.write(message_of(plan, self._model))

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    async def finish(self) -> None:
        for _, call, listener in self._streams:
            await call.done_writing()
            await listener
        for channel, _, _ in self._streams:
            await channel.close()

    async def leave(self) -> None:
        left = time.monotonic()
        for _, call, _ in self._streams:
            call.cancel()
        await asyncio.gather(*(listener for _, _, listener in self._streams))
        for channel, _, _ in self._streams:
            await channel.close()
        for id in self._open:
            self._history.put({"t": left, "kind": "terminal", "id": id, "how": "left", "fault": "cancel"})

    async def _listen(self, call: Any) -> None:
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                id, response = reply.infer_response.id, read(reply)
                note(self._history, id, response)
                if response.finish or response.error is not None:
                    self._open.pop(id, None)
        except asyncio.CancelledError:  # by `leave`
            pass
