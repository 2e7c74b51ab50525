"""The HTTP transport of the asyncio client, with aiohttp. Closing a response cancels its request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp

from paged_client import http_wire
from paged_client.connection_errors import unreachable
from paged_client.types import PagedError
from paged_client.wire import Fields, Values


class HttpTransport:
    must_stream = True

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self.url = http_wire.generate_url(url, model)
        self._headers = {**http_wire.HEADERS, **headers}
        self._session: Any = None

    def open(self, values: Values, request_id: str, timeout: float | None) -> HttpResponses:
        return HttpResponses(self, http_wire.encode_body(values, request_id), timeout)

    async def post(self, body: bytes, timeout: float | None) -> Any:
        if self._session is None:
            # limit=0: by default aiohttp queues all but 100 requests. force_close: the server may have closed a
            # connection that was kept alive.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        limit = aiohttp.ClientTimeout(total=timeout)
        return await self._session.post(self.url, data=body, headers=self._headers, timeout=limit)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class HttpResponses:
    def __init__(self, transport: HttpTransport, body: bytes, timeout: float | None) -> None:
        self.url = transport.url
        self._transport = transport
        self._body = body
        self._timeout = timeout
        self._events: deque[str] = deque()
        self._parser = http_wire.EventParser()
        self._posting: asyncio.Future[Any] | None = None
        self._response: Any = None

    async def next(self) -> Fields | None:
        with _transport_errors(self):
            if self._posting is None:
                # In its own task, so that cancel() can also end the wait for the first response.
                self._posting = asyncio.ensure_future(self._post())
                await self._posting
            while not self._events:
                chunk = await self._response.content.readany()
                if not chunk:
                    return None
                self._events.extend(self._parser.feed(chunk))
            return http_wire.read_fields(self._events.popleft())

    async def _post(self) -> None:
        self._response = response = await self._transport.post(self._body, self._timeout)
        if response.status != 200:
            raise http_wire.http_error(response.status, response.reason or "", await response.read())

    def cancel(self) -> None:
        if self._posting is not None:
            self._posting.cancel()
        if self._response is not None:
            self._response.close()


@contextmanager
def _transport_errors(responses: HttpResponses) -> Iterator[None]:
    """Convert transport errors to PagedError, and close the connection after any error."""
    try:
        yield
    except PagedError:
        responses.cancel()
        raise
    except (TimeoutError, asyncio.TimeoutError):  # different classes until Python 3.11
        responses.cancel()
        raise PagedError("DEADLINE_EXCEEDED", "the request timed out") from None
    except (OSError, aiohttp.ClientError) as error:
        responses.cancel()
        cause = getattr(error, "os_error", error)
        raise unreachable(http_wire.server_of(responses.url), "http", f"{type(cause).__name__}: {error}") from None
