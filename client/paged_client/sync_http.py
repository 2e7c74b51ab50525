"""The HTTP transport of the synchronous client: one connection for each request. Closing it cancels the request."""

from __future__ import annotations

import http.client
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from paged_client import http_wire
from paged_client.connection_errors import unreachable
from paged_client.types import PagedError
from paged_client.wire import Fields, Values


class HttpTransport:
    must_stream = True

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._url = http_wire.generate_url(url, model)
        self._headers = {**http_wire.HEADERS, **headers}

    def open(self, values: Values, request_id: str, timeout: float | None) -> HttpResponses:
        return HttpResponses(self._url, http_wire.encode_body(values, request_id), timeout, self._headers)

    def close(self) -> None:
        """Do nothing: no connection is kept between requests."""


class HttpResponses:
    def __init__(self, url: str, body: bytes, timeout: float | None, headers: Mapping[str, str]) -> None:
        self.url = url
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._events: deque[str] = deque()
        self._parser = http_wire.EventParser()
        self._response: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._connection = http_wire.connection_to(url, timeout)
        with _transport_errors(self):
            self._connection.connect()
            self._socket = self._connection.sock
            self._connection.request("POST", urlsplit(url).path, body, headers)

    def next(self) -> Fields | None:
        with _transport_errors(self):
            while not self._events:
                chunk = self._read()
                if not chunk:
                    self.cancel()
                    return None
                self._events.extend(self._parser.feed(chunk))
            return http_wire.read_fields(self._events.popleft())

    def _read(self) -> bytes:
        self._limit_wait()
        if self._response is None:
            self._response = self._start()
        return self._response.read1(65536)

    def _start(self) -> http.client.HTTPResponse:
        response = self._connection.getresponse()
        if response.status != 200:
            raise http_wire.http_error(response.status, response.reason, response.read())
        return response

    def _limit_wait(self) -> None:
        if self._deadline is None or self._socket is None:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def cancel(self) -> None:
        # shutdown() wakes a thread that is blocked in a read; close() alone does not. The response still holds the
        # descriptor for that thread, so it is freed once both are closed.
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def __del__(self) -> None:
        self.cancel()
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
    except TimeoutError:
        responses.cancel()
        raise PagedError("DEADLINE_EXCEEDED", "the request timed out") from None
    except (OSError, http.client.HTTPException) as error:
        responses.cancel()
        raise unreachable(http_wire.server_of(responses.url), "http", f"{type(error).__name__}: {error}") from None
