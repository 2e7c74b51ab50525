"""The models that a gateway serves: the server's model and its LoRA adapters."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from paged_client.discovery import listed
from paged_client.openai.errors import NO_SUCH_MODEL, ApiError, from_engine, no_such_model
from paged_client.openai.server import Server
from paged_client.types import PagedError

_ANSWER_SECONDS = 10.0  # time limit for the adapters
_LENGTH_SECONDS = 5.0  # time limit for the context length, which the engine returns between two steps
_LENGTH_AGE = 60.0  # seconds after which the context length is read again: a server may have restarted


class ServedModels:
    """Describes the models of `server`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._created = int(time.time())
        self._max_model_len: int | None = None
        self._read_at: float | None = None  # time.monotonic() of the last context length
        self._read_of = ""  # name of the model that has it

    @property
    def _name(self) -> str:
        return self._server.name

    async def cards(self) -> list[dict[str, Any]]:
        """Return the model and its adapters, as OpenAI's API lists models. Raises ApiError without a server."""
        try:
            adapters, length = await asyncio.gather(
                self._server.plain_client.adapters(timeout=_ANSWER_SECONDS), self.context_length()
            )
        except PagedError as error:
            raise from_engine(error, {}) from None
        names = [adapter.name for adapter in adapters if adapter.error is None]
        return [self._card(name, length) for name in (self._name, *names)]

    async def card(self, name: str) -> dict[str, Any]:
        """Return the card with this name, as in `cards`. Raises ApiError for an unknown name."""
        cards = await self.cards()
        for card in cards:
            if card["id"] == name:
                return card
        raise no_such_model(name, [card["id"] for card in cards])

    async def with_names(self, error: ApiError) -> ApiError:
        """Return the error. For an unknown model, its message lists the models."""
        if error.code != NO_SUCH_MODEL:
            return error
        try:
            names = [card["id"] for card in await self.cards()]
        except ApiError:  # the server has just stopped
            names = [self._name]
        return ApiError(error.status, f"{error.message}; choose {listed(names)}", param=error.param, code=error.code)

    async def context_length(self) -> int | None:
        """Return `max_model_len` of the server; None as long as it is unknown."""
        name = self._name
        if self._read_at is None or time.monotonic() > self._read_at + _LENGTH_AGE or name != self._read_of:
            try:
                pool = await self._server.plain_client.pool_map(timeout=_LENGTH_SECONDS)
            except PagedError:
                return self._max_model_len
            self._max_model_len, self._read_at, self._read_of = pool.max_model_len, time.monotonic(), name
        return self._max_model_len

    def _card(self, name: str, length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "paged",
            "root": self._name,  # the model whose weights it has
            "parent": None if name == self._name else self._name,
            "max_model_len": length,
        }
