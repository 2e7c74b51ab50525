"""The models of the server behind the gateway, and their LoRA adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paged_client.async_client import AsyncClient
from paged_client.async_retry import RetryingTransport
from paged_client.discovery import find_models, listed, no_model
from paged_client.openai.chat_template import ChatTemplate
from paged_client.openai.concurrency import cancel_and_wait
from paged_client.openai.errors import NO_SUCH_MODEL, ApiError, from_engine, no_such_model
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import PagedError, PoolMap

T = TypeVar("T")
# Texts of errors of another class than UNAVAILABLE that pass when the server is restarted. They are the engine's, and
# tritonserver's, whose process for the engine has ended or hangs.
_RESTART_TEXTS = ("the engine died", "is not healthy")
OUTPUT_LIMIT = "max_response_mib"  # a limit that UNAVAILABLE can name, and that the same output exceeds again
PAUSE_SECONDS = 0.5  # time after which a request is sent again
FIND_SECONDS = 3.0  # time limit of each question about the models of the server
_ANSWER_SECONDS = 10.0  # time limit for the adapters
_LENGTH_SECONDS = 5.0  # time limit for the context length, which the engine returns between two steps
_LENGTH_AGE = 60.0  # seconds after which the context length is read again: a server may have restarted


class Model:
    """A model of the server.

    Args:
        plain_client: sends each request once.
        client: sends a request without output again while the server fails.
    """

    def __init__(self, name: str, plain_client: AsyncClient, client: AsyncClient) -> None:
        self.name = name
        self.plain_client = plain_client
        self.client = client
        self._context_length: int | None = None
        self._read_at: float | None = None  # time.monotonic() of the last context length

    async def context_length(self) -> int | None:
        """Return `max_model_len`; None as long as it is unknown."""
        if self._read_at is None or time.monotonic() > self._read_at + _LENGTH_AGE:
            with suppress(PagedError):
                pool = await self.plain_client.pool_map(timeout=_LENGTH_SECONDS)
                self._context_length, self._read_at = pool.max_model_len, time.monotonic()
        return self._context_length


@dataclass(frozen=True)
class Choice:
    """A model, or one of its adapters, that a request has chosen with its field `model`."""

    model: Model
    adapter: str | None = None

    @property
    def name(self) -> str:
        return self.adapter or self.model.name


@dataclass(frozen=True)
class _Found:
    """The models of the server when it was asked last."""

    names: tuple[str, ...]
    adapters: dict[str, str] = field(default_factory=dict)  # model by adapter, as far as requests have named adapters


class Models:
    """The models of a server that a gateway serves. An asynchronous context manager.

    Models that are loaded, unloaded or renamed are found when a request names one that is not known, or that the server
    does not have any more, and for each list of models.

    Args:
        url: gRPC endpoint; None is the default one.
        names: the models, as far as they are known.
        are_fixed: whether these are all models to serve; otherwise all that the server has are.
        templates: chat templates to apply in the gateway, by model; None is the only model of the server.
        retry_seconds: time for which a request without output is sent again while the server fails.

    Raises ValueError for an invalid URL.
    """

    def __init__(
        self,
        url: str | None,
        names: Sequence[str],
        *,
        are_fixed: bool,
        templates: Mapping[str | None, ChatTemplate],
        retry_seconds: float,
    ) -> None:
        self._url = url
        self._found = _Found(tuple(names))
        self._are_fixed = are_fixed
        self._templates = templates
        self._retry_seconds = retry_seconds
        self._created = int(time.time())
        self._finding = asyncio.Lock()
        self._models: dict[str, Model] = {}  # all that have been served: an unloaded one may have open streams
        for name in names:
            self._model(name)

    async def __aenter__(self) -> None:
        """Do nothing: clients connect on first use."""

    async def __aexit__(self, *reason: object) -> None:
        for model in self._models.values():
            await model.plain_client.close()

    async def choose(self, name: str | None) -> Choice:
        """Return what a request names; None: the only model.

        Raises ApiError for an unknown name, without a name if there are several models, and without a model. The name
        of an adapter of the only model is not checked: the server does that.
        """
        names = await self._names()
        if name is None and len(names) > 1:
            raise ApiError(400, f"model: is missing, and there are several; choose {listed(names)}", param="model")
        if name is None or name in names:
            return Choice(self._model(name or names[0]))
        if len(names) == 1:
            return Choice(self._model(names[0]), name)
        found = self._found
        if name not in found.adapters:
            found.adapters[name] = await self._owner(name, names)
        return Choice(self._model(found.adapters[name]), name)

    async def up_to_date(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work` returns. It is repeated if it fails for a model that the server does not have, and the
        server turns out to have others than known before."""
        before = self._found
        try:
            return await work()
        except (ApiError, PagedError) as error:
            if (error.code or "").lower() not in ("not_found", NO_SUCH_MODEL) or not await self._has_changed(before):
                raise
        return await work()

    def template(self, model: Model) -> ChatTemplate | None:
        """Return the chat template to apply for a model; None: the server applies the model's.

        Raises ApiError if there is one for the only model, and the server has several.
        """
        if None in self._templates and len(self._found.names) > 1:
            problem = f"the server has several models ({listed(self._found.names)}); the gateway needs it as NAME=DIR"
            raise ApiError(503, f"--tokenizer: {problem}", code="unavailable")
        return self._templates.get(model.name, self._templates.get(None))

    async def cards(self) -> list[dict[str, Any]]:
        """Return the models and their adapters, as OpenAI's API lists models. Raises ApiError without a server."""
        if not self._are_fixed:
            with suppress(PagedError):
                await self._find(self._found)
        models = [self._model(name) for name in await self._names(retry_seconds=0.0)]
        answers = await asyncio.gather(*(self._cards_of(model) for model in models), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) == len(models):
            raise from_engine(errors[0], {}) if isinstance(errors[0], PagedError) else errors[0]
        return [card for cards in answers if not isinstance(cards, BaseException) for card in cards]

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
            names = list(dict.fromkeys(card["id"] for card in await self.cards()))
        except ApiError:  # the server has just stopped
            names = list(self._found.names)
        return ApiError(error.status, f"{error.message}; choose {listed(names)}", param=error.param, code=error.code)

    async def pool_map(self, *, timeout: float) -> PoolMap:
        """Return the block pool of the first model that answers and is awake, or of one that sleeps if all do.

        All are asked once, at the same time. Raises ApiError or PagedError if none answers.
        """
        clients = [self._model(name).plain_client for name in await self._names(retry_seconds=0.0)]
        asked = [asyncio.ensure_future(client.pool_map(timeout=timeout)) for client in clients]
        pool: PoolMap | None = None
        problem: PagedError | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    pool = await answer
                except PagedError as error:
                    problem = error
                else:
                    if not pool.sleeping:
                        return pool
        finally:
            await cancel_and_wait(*asked)
        if pool is None:
            assert problem is not None
            raise problem
        return pool

    def _model(self, name: str) -> Model:
        if name not in self._models:
            plain = AsyncClient(self._url, name)
            client = plain.with_transport(
                lambda transport: RetryingTransport(
                    transport, lambda error, seconds: _passes(error, seconds, self._retry_seconds), PAUSE_SECONDS
                )
            )
            self._models[name] = Model(name, plain, client)
        return self._models[name]

    async def _names(self, retry_seconds: float | None = None) -> tuple[str, ...]:
        """Return the names of the models, of which there is at least one. Raises ApiError.

        retry_seconds: time for which a server is asked again that cannot be reached; None: as for a request.
        """
        began, limit = time.monotonic(), self._retry_seconds if retry_seconds is None else retry_seconds
        while not self._found.names:
            try:
                await self._find(self._found)
                if not self._found.names:
                    raise no_model(self._url or DEFAULT_URLS["grpc"])
            except PagedError as error:
                if not _passes(error, time.monotonic() - began, limit):
                    raise from_engine(error, {}) from None
                await asyncio.sleep(PAUSE_SECONDS)
        return self._found.names

    async def _find(self, outdated: _Found) -> None:
        """Ask the server for its models, unless another call has done so since `outdated`. Raises PagedError."""
        async with self._finding:
            if self._found is outdated:
                url = self._url or DEFAULT_URLS["grpc"]
                self._found = _Found(tuple(await asyncio.to_thread(find_models, url, "grpc", FIND_SECONDS)))

    async def _has_changed(self, before: _Found) -> bool:
        """Ask the server for its models. Return whether a request may now name others than `before`."""
        if self._are_fixed:
            return False
        with suppress(PagedError):
            await self._find(before)
        return self._found.names != before.names or bool(before.adapters)

    async def _owner(self, adapter: str, names: Sequence[str]) -> str:
        """Return which of several models has an adapter. Raises ApiError unless it is exactly one."""
        asked = (_adapters(self._model(name).client) for name in names)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        owners = [
            name
            for name, answer in zip(names, answers, strict=True)
            if not isinstance(answer, BaseException) and adapter in answer
        ]
        if len(owners) == 1:
            return owners[0]
        if owners:
            problem = f"is an adapter of several models ({listed(owners)}); rename it in all but one of them"
            raise ApiError(400, f"model={adapter[:80]!r}: {problem}", param="model")
        for error in answers:
            if isinstance(error, BaseException):
                raise from_engine(error, {}) if isinstance(error, PagedError) else error
        raise no_such_model(adapter)

    async def _cards_of(self, model: Model) -> list[dict[str, Any]]:
        adapters, length = await asyncio.gather(_adapters(model.plain_client), model.context_length())
        return [self._card(name, model, length) for name in (model.name, *adapters)]

    def _card(self, name: str, model: Model, length: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "paged",
            "root": model.name,  # the model whose weights it has
            "parent": None if name == model.name else model.name,
            "max_model_len": length,
        }


async def _adapters(client: AsyncClient) -> list[str]:
    """Return the names of a model's adapters that can be loaded. Raises PagedError."""
    found = await client.adapters(timeout=_ANSWER_SECONDS)
    return [adapter.name for adapter in found if adapter.error is None]


def _passes(error: PagedError, seconds: float, limit: float) -> bool:
    """Return whether a request may succeed if it is sent again. seconds: time since it was sent first."""
    is_passing = error.code == "UNAVAILABLE" or any(text in str(error) for text in _RESTART_TEXTS)
    return is_passing and OUTPUT_LIMIT not in str(error) and seconds + PAUSE_SECONDS <= limit
