"""The HTTP body of a request, for programs that send it themselves, and the same as a curl command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from paged_client import http_wire
from paged_client.wire import Message, Prompt, check_timeout, request_values


def http_body(
    prompt: Prompt | None = None,
    *,
    messages: Sequence[Message] | None = None,
    stream: bool = False,
    request_id: str = "",
    **sampling: object,
) -> dict[str, Any]:
    """Return the JSON object to post to Triton's `generate`, or with `stream` to `generate_stream`.

    Triton takes strings and numbers, not objects: messages, tools, sampling parameters and schemas become strings that
    hold JSON. Arguments as for `Client.stream`.

    Raises ValueError for invalid arguments.
    """
    values = request_values(prompt, messages, sampling, stream=stream)
    body: dict[str, Any] = json.loads(http_wire.encode_body(values, request_id))
    return body


def curl_command(url: str, model: str, body: dict[str, Any], timeout: float | None = None) -> str:
    """Return a shell command that posts a body of `http_body` to the HTTP endpoint at `url`."""
    endpoint = http_wire.generate_url(url, model)
    if not body.get("stream"):
        endpoint = endpoint.removesuffix("_stream")
    limit = "" if check_timeout(timeout) is None else f" --max-time {timeout:g}"
    flags = f" -N{limit}" if body.get("stream") else limit
    return f"curl{flags} {endpoint} \\\n  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
