"""Values by key in a Redis server, with a time limit on every call."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from paged_backend.api.errors import ConfigError
from paged_backend.api.redis_address import RedisAddress
from paged_backend.utils.worker import CallTimeout, call_with_timeout

MAX_REASON_CHARS = 300
CONNECT_SECONDS = 2.0  # limit of `connect`, which looks up the host's name and exchanges certificates

Result = TypeVar("Result")


class StoreError(Exception):
    """A call of the store failed or took too long. The message has the reason, and never a password."""


class RedisStore:
    """A Redis server. Safe to use from any thread. A call that fails is not repeated."""

    def __init__(self, address: RedisAddress, password: str | None, timeout: float):
        """Connect at the first call. password: instead of the address's. timeout: limit of a call in seconds.

        Raises ConfigError if the package redis is missing, or a certificate's file.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(
                f"remote_cache_url: a package is missing ({error}); run pip install 'paged-llm-triton[remote]'"
            ) from None
        for name, path in address.tls_files:
            if not Path(path).is_file():
                raise ConfigError(f"remote_cache_url: {name}={path}: is not a file")
        self.address = address
        self._timeout = timeout
        # The limit of a socket applies to each packet, so it does not replace that of a call. It is longer, so that the
        # limit of the call is the one that is reported.
        self._client = redis.Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=password or address.password,
            ssl=address.tls,
            **dict(address.tls_files),  # type: ignore[arg-type]
            socket_timeout=2 * timeout,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )

    def connect(self) -> None:
        """Open a connection and log in. Raises StoreError, as every method."""
        self._call(self._client.ping, max(self._timeout, CONNECT_SECONDS))

    def get(self, keys: Sequence[bytes], max_bytes: int, ttl: int) -> list[bytes]:
        """Return the first `max_bytes` bytes of each value, nothing if there is no such value. ttl: seconds after which
        the values expire from now on."""

        def read() -> list[bytes]:
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.getrange(key, 0, max_bytes - 1)
                pipeline.expire(key, ttl)
            return pipeline.execute()[::2]

        return self._call(read)

    def set(self, key: bytes, value: bytes, ttl: int) -> None:
        """Store a value, which expires after `ttl` seconds."""
        self._call(lambda: self._client.set(key, value, ex=ttl))

    def expire(self, keys: Sequence[bytes], ttl: int) -> list[bool]:
        """Let values expire after `ttl` seconds from now on. Return for each whether there is one."""

        def renew() -> list[bool]:
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.expire(key, ttl)
            return pipeline.execute()

        return self._call(renew)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete values, if there are any."""
        if keys:
            self._call(lambda: self._client.unlink(*keys))

    def close(self) -> None:
        """Close all connections. A call that is in progress fails."""
        with contextlib.suppress(Exception):  # another thread may use or close a connection at the same time
            self._client.connection_pool.disconnect(inuse_connections=True)

    def _call(self, call: Callable[[], Result], seconds: float | None = None) -> Result:
        try:
            return call_with_timeout(call, seconds or self._timeout, "remote-store")
        except CallTimeout as error:
            self.close()  # which ends the call
            raise StoreError(f"a call {error}") from None
        except Exception as error:  # of redis, of the network, or of TLS
            raise StoreError(f"{type(error).__name__}: {_readable(str(error))}") from None


def _readable(text: str) -> str:
    """Return a text that the store may have chosen as one that can be logged."""
    return textwrap.shorten(
        "".join(char if char.isprintable() else " " for char in text[: 2 * MAX_REASON_CHARS]),
        MAX_REASON_CHARS,
        placeholder=" ...",
    )
