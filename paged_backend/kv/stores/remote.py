"""The remote store of the prefix cache: cached blocks in a Redis server, which several servers share.

    paged:<fingerprint of model and layout>:<name of the secret>:<key of the block>    one value per block

`block_file.py` has the format of the data. A value that does not read back as it was written is never used. At any
error, and when a call takes too long, the store is disabled; a thread of its own then tries the server again until a
block can be written and read.

A value is authenticated with HMAC-SHA256 if servers share a secret, since others can write to the server:

    value = authentication code (32 bytes), data        the code covers the key and the data

Without a secret a value is the data alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from paged_backend.api.errors import ConfigError
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.secrets import MIN_KEY_BYTES
from paged_backend.kv.content import BlockKey
from paged_backend.kv.stores.block_file import MAX_HEADER_BYTES, TOKEN_TYPE, BlockFormat
from paged_backend.kv.stores.store import BlockStore
from paged_backend.utils.lru import LruIndex
from paged_backend.utils.worker import CallTimeout, call_with_timeout

log = logging.getLogger("paged_llm")

RETRY_SECONDS = 1.0  # time after which a disabled store is tried again; doubles with every failure
MAX_RETRY_SECONDS = 60.0  # maximum of that time; a store that has worked this long starts again with RETRY_SECONDS
REFRESH_KEYS = 256  # keys whose time to live is renewed in one call
PROBE_TTL = 60  # seconds after which a value that was written to try the server expires


MAX_REASON_CHARS = 300
CONNECT_SECONDS = 2.0  # limit of `connect`, which looks up the host's name and exchanges certificates

Result = TypeVar("Result")


class StoreError(Exception):
    """A call of the server failed or took too long. The message has the reason, and never a password."""


class RedisClient:
    """A Redis server. Safe to use from any thread. A call that fails is not repeated."""

    def __init__(self, address: RedisAddress, password: str | None, timeout: float):
        """Prepare the client, which connects at the first call. password: replaces the password of the address.
        timeout: limit of a call in seconds.

        Raises ConfigError if the package redis or the file of a certificate is missing.
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
        # A socket's limit applies to each packet, so it does not replace the limit of a call. It is longer, so that
        # errors name the limit of the call.
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
        """Open a connection and log in. Like every method, raises StoreError."""
        self._call(self._client.ping, max(self._timeout, CONNECT_SECONDS))

    def get(self, keys: Sequence[bytes], max_bytes: int, ttl: int) -> list[bytes]:
        """Return the first `max_bytes` bytes of each value, empty for a key without a value. ttl: seconds from now
        after which the values expire."""

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
        """Let the values of these keys expire `ttl` seconds from now. Return for each key whether it has a value."""

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
        except Exception as error:  # an error of redis, the network or TLS
            raise StoreError(f"{type(error).__name__}: {_readable(str(error))}") from None


def _readable(text: str) -> str:
    """Return text from the server in a form that is safe to log."""
    return textwrap.shorten(
        "".join(char if char.isprintable() else " " for char in text[: 2 * MAX_REASON_CHARS]),
        MAX_REASON_CHARS,
        placeholder=" ...",
    )


# Maximum number of known keys. Above it, values of this server are deleted, as above the budget.
MAX_KNOWN_KEYS = 1 << 17


class KnownKeys:
    """The keys that the server is known to have, least recently used first. Safe to use from any thread."""

    def __init__(self, budget: int, ttl: float):
        """budget: maximum bytes of the values that this process has written. ttl: seconds after which the server
        deletes a value that was not used."""
        self._budget = budget
        self._ttl = ttl
        self._lock = threading.Lock()
        # time.monotonic() at which the server may have deleted the value; of 0 bytes if another server has written it
        self._expiry: LruIndex[bytes, float] = LruIndex()

    @property
    def nbytes(self) -> int:
        """The bytes of the values that this process has written and not deleted. The server may have less."""
        return self._expiry.nbytes

    def __contains__(self, key: bytes) -> bool:
        """Return whether the server has a key, unless somebody has deleted it."""
        with self._lock:
            return (self._expiry.get(key) or 0.0) > time.monotonic()

    def evictable(self, nbytes: int) -> list[bytes]:
        """Return the least recently used keys whose values must be deleted to make room for a value of `nbytes`. They
        stay known until they are removed, so they still count if the server does not delete them. Keys of other servers
        that are just as old are forgotten."""
        with self._lock:
            excess = self._expiry.excess(self._budget - nbytes, MAX_KNOWN_KEYS - 1)
            own = [key for key in excess if self._expiry.size(key)]
            for key in set(excess).difference(own):
                self._expiry.remove(key)
        return own

    def add(self, key: bytes, nbytes: int = 0) -> None:
        """Add a key as the most recently used. nbytes: size of the value if this server writes it. A key whose value
        was only read is not added beyond MAX_KNOWN_KEYS."""
        with self._lock:
            if nbytes or key in self._expiry or len(self._expiry) < MAX_KNOWN_KEYS:
                self._expiry.put(key, time.monotonic() + self._ttl, nbytes or self._expiry.size(key))

    def remove(self, *keys: bytes) -> None:
        """Remove keys that the server does not have, if they are known."""
        with self._lock:
            for key in keys:
                self._expiry.remove(key)

    def expire(self) -> None:
        """Assume that the server has lost all values, for example because it was restarted. Their sizes still count."""
        with self._lock:
            for key in list(self._expiry):
                self._expiry.put(key, 0.0, self._expiry.size(key))


CODE_BYTES = hashlib.sha256().digest_size


class ForgedValue(Exception):
    """A value was not written by a server with the same secret, or was changed since."""


class Seal:
    """Seals data under a key, and opens it again."""

    def __init__(self, secret: bytes | None):
        """secret: shared by all servers that read each other's values, at least MIN_KEY_BYTES; None: values are not
        authenticated."""
        assert secret is None or len(secret) >= MIN_KEY_BYTES
        self._secret = secret

    @property
    def name(self) -> str:
        """A name for the secret: other secrets have other names. It does not reveal the secret."""
        if self._secret is None:
            return "unauthenticated"
        return hmac.digest(self._secret, b"name of the secret", "sha256")[:8].hex()

    @property
    def extra_bytes(self) -> int:
        """How many bytes a value is longer than its data."""
        return 0 if self._secret is None else CODE_BYTES

    def close(self, key: bytes, data: bytes) -> bytes:
        """Return the value that stores data under a key."""
        return data if self._secret is None else self._code(self._secret, key, data) + data

    def open(self, key: bytes, value: bytes) -> bytes:
        """Return the data of a value that was read from a key. Raises ForgedValue."""
        if self._secret is None:
            return value
        data = value[CODE_BYTES:]
        if not hmac.compare_digest(value[:CODE_BYTES], self._code(self._secret, key, data)):
            raise ForgedValue("its authentication code is wrong")
        return data

    @staticmethod
    def _code(secret: bytes, key: bytes, data: bytes) -> bytes:
        code = hmac.new(secret, len(key).to_bytes(8, "little"), "sha256")
        code.update(key)
        code.update(data)
        return code.digest()


class RemoteStore(BlockStore):
    """Cached blocks in a Redis server. A disabled store is tried again until the server works."""

    def __init__(
        self,
        client: RedisClient,
        fingerprint: str,
        block_format: BlockFormat,
        *,
        budget: int,
        ttl: int,
        secret: bytes | None = None,
    ):
        """Try the server; if it does not work, start disabled.

        Args:
            client: the server; closed with the store.
            fingerprint: digest of everything besides the tokens that keys and values depend on.
            budget: maximum bytes of the values that this process has written.
            ttl: seconds after the last use of a block until it expires.
            secret: see `Seal`.
        """
        self._client = client
        self._format = block_format
        self._seal = Seal(secret)
        self._namespace = f"paged:{fingerprint}:{self._seal.name}:".encode()
        self._budget = budget
        self._ttl = ttl
        self._keys = KnownKeys(budget, ttl)
        self._invalid: set[bytes] = set()  # keys of values that must not be read again
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._up_since = time.monotonic()
        self._pause = RETRY_SECONDS
        self._read = self._written = self._disabled = 0
        super().__init__("remote")
        try:
            self._probe()
        except StoreError as error:
            self._disable(str(error))

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the store, by name. Counters count since the start."""
        return {
            "remote_up": self._up,
            "remote_read": self._read,  # blocks
            "remote_written": self._written,
            "remote_disabled": self._disabled,
            "remote_bytes": self._keys.nbytes,
            "remote_seconds": self.cost.seconds_per_block,
        }

    def should_write(self, key: BlockKey) -> bool:
        """Return whether the store is in use and the server is not known to have the block."""
        return self._up and self._key(key) not in self._keys

    def has(self, key: BlockKey) -> bool:
        """Return whether the store is in use and the server is known to have the block."""
        return self._up and self._key(key) in self._keys

    def refresh(self, blocks: Sequence[BlockKey]) -> None:
        """Renew the time to live of the blocks that the server is known to have, and forget those that it has lost."""
        known = [key for key in map(self._key, blocks) if key in self._keys] if self._up else []
        for start in range(0, len(known), REFRESH_KEYS):
            keys = known[start : start + REFRESH_KEYS]
            try:
                renewed = self._client.expire(keys, self._ttl)
            except StoreError as error:
                self._disable(str(error))
                return
            for key, is_there in zip(keys, renewed, strict=True):
                self._keys.add(key) if is_there else self._keys.remove(key)

    def read(self, keys: Sequence[BlockKey]) -> list[Tensor]:
        """Return the first of the blocks, up to the first one that is not in the server or not valid."""
        if not self._up or not keys:
            return []
        began, names = time.monotonic(), [self._key(key) for key in keys]
        try:
            values = self._client.get(names, self._max_bytes(keys[-1]), self._ttl)
        except StoreError as error:
            self._disable(str(error))
            return []
        blocks: list[Tensor] = []
        for key, name, value in zip(keys, names, values, strict=True):
            if (block := self._decode(key, name, value)) is None:
                break
            blocks.append(block)
        self.cost.record(time.monotonic() - began, len(blocks) or len(keys))
        with self._lock:
            self._read += len(blocks)
        return blocks

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the store's threads. Wait at most `seconds`; None: without limit."""
        super().close(seconds)
        self._closed.set()
        self._client.close()

    def _key(self, key: BlockKey) -> bytes:
        return self._namespace + key.name.encode()

    def _max_bytes(self, key: BlockKey) -> int:
        """Return the maximum size of a block's value. Values of blocks before it in the prefix are smaller."""
        tokens = TOKEN_TYPE.itemsize * len(key.entry.prefix[1])
        return self._format.block_bytes + tokens + MAX_HEADER_BYTES + self._seal.extra_bytes

    def _decode(self, key: BlockKey, name: bytes, value: bytes) -> Tensor | None:
        """Return the block in a value. None if there is no value, it is not valid, or it holds another block with the
        same key."""
        if not value:
            self._keys.remove(name)
            return None
        try:
            block = self._format.decode(key, self._seal.open(name, value))
        except Exception as error:  # changed or forged; safetensors raises several types
            with self._lock:
                self._invalid.add(name)
            self._disable(f"the value of {name.decode()} is not valid: {type(error).__name__}: {error}")
            return None
        self._keys.add(name)
        return block

    def _write(self, key: BlockKey, block: Tensor) -> None:
        if not self.should_write(key):
            return
        try:
            name = self._key(key)
            value = self._seal.close(name, self._format.encode(key, block))
            if len(value) > self._budget:
                raise StoreError(f"a block takes {len(value)} bytes, and remote_cache_gib is {self._budget} bytes")
            evicted = self._keys.evictable(len(value))
            self._client.delete(evicted)
            self._keys.remove(*evicted)
            self._keys.add(name, len(value))  # before it is written: the server may have it although the call fails
            self._client.set(name, value, self._ttl)
            with self._lock:
                self._written += 1
        except Exception as error:  # the writer must survive any error, or the queue would never empty
            self._disable(str(error))

    def _probe(self) -> None:
        """Write and read a value of a block's size. Raises StoreError."""
        self._client.connect()
        key, value = self._namespace + b"probe:" + uuid.uuid4().hex.encode(), bytes(self._format.block_bytes)
        self._client.set(key, value, PROBE_TTL)
        values = self._client.get([key], len(value), PROBE_TTL)
        self._client.delete([key])
        if values != [value]:
            raise StoreError("does not return what was written")

    def _disable(self, reason: str) -> None:
        """Disable the store, and start the thread that tries it again."""
        with self._lock:
            if not self._up or self._closed.is_set():
                return
            self._up = False
            self._disabled += 1
            if time.monotonic() - self._up_since > MAX_RETRY_SECONDS:
                self._pause = RETRY_SECONDS
        self._keys.expire()
        log.error(
            "remote_cache_url: %s: %s; the remote cache is disabled and will be tried again",
            self._client.address,
            reason,
        )
        threading.Thread(target=self._recover, name="remote-retry", daemon=True).start()
        self._changed()

    def _recover(self) -> None:
        """Try the server again until it works, with growing pauses, then enable the store."""
        while not self._closed.wait(self._pause):
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS)
            try:
                self._probe()
                with self._lock:
                    invalid = list(self._invalid)
                self._client.delete(invalid)
            except StoreError as error:
                log.debug("remote_cache_url: %s: still disabled: %s", self._client.address, error)
                continue
            self.cost.reset()
            with self._lock:
                self._invalid.difference_update(invalid)
                self._up_since = time.monotonic()
                self._up = True
            log.warning("remote_cache_url: %s: the remote cache is in use again", self._client.address)
            self._changed()
            return
