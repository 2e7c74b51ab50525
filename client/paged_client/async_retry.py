"""Sends requests of the asyncio client again, for errors that pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from paged_client.async_stream import AsyncResponses, AsyncTransport
from paged_client.types import PagedError
from paged_client.wire import Fields, Values

ShouldRetry = Callable[[PagedError, float], bool]  # (error, seconds since the request was sent first) -> whether


class RetryingTransport:
    """A transport that sends a request again if it fails before the first response.

    Args:
        should_retry: decides for each error.
        interval: seconds before a request is sent again.
    """

    def __init__(self, transport: AsyncTransport, should_retry: ShouldRetry, interval: float) -> None:
        self.must_stream = transport.must_stream
        self.close = transport.close
        self._transport = transport
        self._should_retry = should_retry
        self._interval = interval

    def open(self, values: Values, request_id: str, timeout: float | None) -> AsyncResponses:
        return _RetryingResponses(
            lambda: self._transport.open(values, request_id, timeout), self._should_retry, self._interval
        )


class _RetryingResponses:
    def __init__(self, send: Callable[[], AsyncResponses], should_retry: ShouldRetry, interval: float) -> None:
        self._send = send
        self._should_retry = should_retry
        self._interval = interval
        self._sent_at = time.monotonic()
        self._responses = send()
        self._has_response = False
        self._cancelled = False

    async def next(self) -> Fields | None:
        while not self._cancelled:
            try:
                response = await self._responses.next()
            except PagedError as error:
                if self._has_response or not self._should_retry(error, time.monotonic() - self._sent_at):
                    raise
            else:
                self._has_response = True
                return response
            await asyncio.sleep(self._interval)
            if not self._cancelled:
                self._responses.cancel()
                self._responses = self._send()
        return None

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()
