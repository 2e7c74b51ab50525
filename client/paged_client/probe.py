"""Checks that the engine of a server works, as `paged probe` and `paged serve --restart` do."""

from __future__ import annotations

import re
import uuid

from paged_client.sync_client import Client
from paged_client.types import PagedError

HIGHEST_PRIORITY = -(2**31)  # lower numbers are scheduled first


def probe(client: Client, timeout: float | None) -> None:
    """Check that the engine works: generate a token. A model that generates none, such as a classifier or a model that
    is asleep, is asked for a pool map instead, which the engine loop answers. Raises PagedError if that fails, unless
    the waiting queue is full, which shows that the engine works.

    The request has the highest priority that the server admits, and a cache salt of its own: it neither waits behind
    other requests nor counts against another tenant. It is not traced.
    """
    try:
        _generate_token(client, timeout)
    except PagedError as error:
        if error.code == "INVALID_ARGUMENT" or (error.code == "UNAVAILABLE" and "`paged wake`" in str(error)):
            client.pool_map(timeout=timeout)
        elif error.code != "UNAVAILABLE" or "max_queue_size" not in str(error):
            raise


def _generate_token(client: Client, timeout: float | None) -> None:
    def generate_at(priority: int) -> None:
        client.generate(
            "ok",
            timeout=timeout,
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            priority=priority,
            cache_salt=f"probe-{uuid.uuid4()}",
            traceparent=f"00-{uuid.uuid4().hex}-{uuid.uuid4().hex[:16]}-00",  # 00: not sampled
        )

    try:
        generate_at(HIGHEST_PRIORITY)
    except PagedError as error:
        lowest_number = re.search(r"priority=\S+ must be (-?\d+)\.\.\d+ \(min_priority\)", str(error))
        if not lowest_number:
            raise
        generate_at(int(lowest_number[1]))
