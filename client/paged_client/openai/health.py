"""Checks whether a model behind the gateway answers requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from paged_client.openai.errors import ApiError
from paged_client.types import PagedError, PoolMap

AGE_SECONDS = 1.0  # time for which an answer is kept


class Health:
    """Asks the server at most once a second, however many clients ask, because the question needs no key.

    Args:
        ask: returns a pool map. The engine loop itself answers this request, so it must be running.
    """

    def __init__(self, ask: Callable[[], Awaitable[PoolMap]]) -> None:
        self._ask = ask
        self._asked: asyncio.Future[ApiError | None] | None = None  # shared by the clients that wait for it
        self._until = 0.0  # time.monotonic() until which the answer is kept

    async def check(self) -> None:
        """Raise ApiError if no model is ready, or all that are ready sleep."""
        if self._asked is None or (self._asked.done() and time.monotonic() >= self._until):
            self._asked = asyncio.ensure_future(self._problem())
        if problem := await asyncio.shield(self._asked):  # a client that leaves does not end it for the others
            raise ApiError(problem.status, problem.message, code=problem.code)

    async def _problem(self) -> ApiError | None:
        try:
            if not (await self._ask()).sleeping:
                return None
            reason = "awake; `paged wake` wakes one"
        except (ApiError, PagedError) as error:
            reason = f"ready: {error}"
        finally:
            self._until = time.monotonic() + AGE_SECONDS
        return ApiError(503, f"no model is {reason}", code="unavailable")
