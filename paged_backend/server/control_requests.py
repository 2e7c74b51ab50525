"""Answers control requests (server/wire/call.py)."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.engine import Engine
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.server.responder import Responder
from paged_backend.server.wire.channel import Channel, respond
from paged_backend.server.wire.responses import write_adapters


class ControlRequests:
    """Answers requests for pool maps and adapter lists, and ends requests by id."""

    def __init__(self, engine: Engine, responder: Responder, adapters: AdapterRegistry | None, slots: AdapterSlots):
        self._engine = engine
        self._responder = responder
        self._adapters = adapters
        self._slots = slots
        self._answers: dict[str, Callable[[Channel, str], None]] = {
            "pool_map": self._send_pool_map,
            "adapters": self._send_adapters,
            "stop_request": self._stop_request,
        }

    def answer(self, name: str, channel: Channel, request_id: str) -> None:
        """Answer the control request `name`, one of CONTROL_REQUESTS. Raises RequestError if it is incomplete."""
        self._answers[name](channel, request_id)

    def _send_pool_map(self, channel: Channel, request_id: str) -> None:
        self._responder.request_pool_map(channel)
        self._engine.snapshot_pool()

    def _send_adapters(self, channel: Channel, request_id: str) -> None:
        def send() -> None:
            found = self._adapters.describe(self._slots.resident) if self._adapters else []
            channel.send(write_adapters(found), final=True)

        if self._adapters:
            self._adapters.run(lambda: respond(channel, send))  # the registry changes only on its own thread
        else:
            respond(channel, send)

    def _stop_request(self, channel: Channel, request_id: str) -> None:
        if not request_id:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                "stop_request: has no request id (`id` over HTTP); set it to that of the request to end",
            )
        self._responder.cancel(channel, request_id)
