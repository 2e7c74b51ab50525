"""The HTTP encoding of requests, responses and errors: Triton's generate extension with server-sent events.

Only `/generate_stream` is used. `/generate` requires exactly one response, and the server notices a disconnect only
when it writes to the client, so only streamed requests can be cancelled.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlsplit

from paged_client.addresses import http_base
from paged_client.types import PagedError
from paged_client.wire import OUTPUTS, Fields, Values

# Triton sends every error of a model with status 400, so 400 does not identify the error class.
_CODES = {404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 502: "UNAVAILABLE", 503: "UNAVAILABLE"}
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


def generate_url(url: str, model: str) -> str:
    """Return the URL to post to for HOST:PORT or an http(s) URL. Raises ValueError for anything else."""
    return f"{http_base(url)}/v2/models/{quote(model, safe='')}/generate_stream"


def connection_to(url: str, timeout: float | None) -> http.client.HTTPConnection:
    """Return a connection to the server of an http(s) URL, not open yet."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=timeout)


def server_of(url: str) -> str:
    """Return the address in a URL of `generate_url`, without its path."""
    return url.partition("/v2/")[0].removeprefix("http://")


def encode_body(values: Values, request_id: str) -> bytes:
    identity = {"id": request_id} if request_id else {}
    return json.dumps({**identity, **values}).encode()


def read_fields(data: str) -> Fields:
    """Return the outputs in the data of an event, by name. Raises PagedError if it is an error."""
    response = _parse(data)
    if "error" in response:
        raise PagedError.parse(str(response["error"]))
    # Triton writes an output of one element without a list.
    values = {name: response[name] for name in OUTPUTS if name in response}
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def _parse(data: str) -> dict[str, Any]:
    try:
        response = json.loads(data)
    except ValueError:
        response = None
    if not isinstance(response, dict):
        raise PagedError("INTERNAL", f"the server sent {data[:200]!r} instead of a JSON object")
    return response


def http_error(status: int, reason: str, body: bytes) -> PagedError:
    """Return the PagedError of a reply whose status is not 200: the class in its body, or one for the status.

    Errors of the server are a JSON object. Errors of the model are an event with one, also with status 400.
    """
    text = body.decode(errors="replace").strip()
    code = _CODES.get(status, "UNKNOWN")
    try:
        return PagedError.parse(str(json.loads(text.removeprefix("data:"))["error"]), code)
    except (ValueError, KeyError, TypeError):
        return PagedError(code, f"HTTP {status} {reason} {text[:200]}".strip())


class EventParser:
    """An incremental parser of text/event-stream (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # parts of the incomplete last line
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Add bytes, which may end anywhere, and return the data of the events that they complete."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts.clear()
        self._parts.append(rest)
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> str | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" ").decode())
        if line or not self._data:
            return None  # other fields and comments are not used
        event, self._data = "\n".join(self._data), []
        return event
