"""Requests, responses and errors as HTTP carries them: Triton's generate extension, server-sent events.

Only `/generate_stream` is used. `/generate` refuses any but exactly one response, and a client that leaves
is noticed only when something is written to it: a streamed answer can be cancelled, that one cannot.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlsplit

from client.types import PagedError
from client.wire import OUTPUTS, Fields, Values

# Every error of the model is 400, whatever its class, so that status says nothing.
_CODES = {404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED", 502: "UNAVAILABLE", 503: "UNAVAILABLE"}
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


def generate_url(url: str, model: str) -> str:
    """HOST:PORT, http://… or https://… -> the address to post to. Raises ValueError for anything else."""
    base = url if "//" in url else f"http://{url}"
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r}: HTTP takes HOST:PORT, http://HOST:PORT or https://HOST:PORT")
    return f"{base.rstrip('/')}/v2/models/{quote(model, safe='')}/generate_stream"


def encode_body(values: Values, request_id: str) -> bytes:
    identity = {"id": request_id} if request_id else {}
    return json.dumps({**identity, **values}).encode()


def read_fields(data: str) -> Fields:
    """One event's data -> its outputs. Raises PagedError where it is an error."""
    response = _parse(data)
    if "error" in response:
        raise PagedError.parse(str(response["error"]))
    # An output of one element comes as that element.
    values = {name: response[name] for name in OUTPUTS if name in response}
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def _parse(data: str) -> dict[str, Any]:
    try:
        response = json.loads(data)
    except ValueError:
        response = None
    if not isinstance(response, dict):
        raise PagedError("INTERNAL", f"the server sent {data[:200]!r} where a JSON object was due")
    return response


def http_error(status: int, reason: str, body: bytes) -> PagedError:
    """The error of a reply other than 200: the class that its text names, else one for the status.

    The server's own refusals are a JSON object; the model's are an event that holds one, in spite of 400.
    """
    text = body.decode(errors="replace").strip()
    code = _CODES.get(status, "UNKNOWN")
    try:
        return PagedError.parse(str(json.loads(text.removeprefix("data:"))["error"]), code)
    except (ValueError, KeyError, TypeError):
        return PagedError(code, f"HTTP {status} {reason} {text[:200]}".strip())


class EventParser:
    """Bytes of a text/event-stream, cut anywhere -> the data of each event (WHATWG HTML, section 9.2)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that is not complete yet
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The events that `chunk` completes, oldest first."""
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
            return None  # other fields and comments carry nothing here
        event, self._data = "\n".join(self._data), []
        return event
