"""The remote tier of the prefix cache: cached blocks in a Redis server, which several servers share.

    paged:<fingerprint of model and layout>:<name of the secret>:<key of the block>    one value per block

`block_file.py` and `sealed_value.py` have the format. A value that does not read back as it was written is never used.
At any error the tier is disabled, as it is when a call takes too long; a thread of its own then tries the store again
until a block can be written and read.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paged_backend.memory.block_file import MAX_HEADER_BYTES, TOKEN_TYPE, BlockFormat
from paged_backend.memory.cache_tier import CacheTier
from paged_backend.memory.known_keys import KnownKeys
from paged_backend.memory.redis_store import RedisStore, StoreError
from paged_backend.memory.sealed_value import Seal
from paged_backend.scheduling.content import Entry
from paged_backend.scheduling.stats import SchedulerStats

log = logging.getLogger("paged_llm")

RETRY_SECONDS = 1.0  # time after which a disabled tier is tried again; doubles with every failure
MAX_RETRY_SECONDS = 60.0  # maximum of it; a tier that has worked for as long starts again with RETRY_SECONDS
REFRESH_KEYS = 256  # keys whose time to live is renewed in one call
PROBE_TTL = 60  # seconds after which a value that was written to try the store expires


@dataclass(frozen=True)
class RemoteStats:
    """Statistics of a remote tier, since the start."""

    up: bool
    read: int  # blocks read
    written: int  # blocks written
    dropped: int  # blocks not written because the queue was full
    disabled: int  # how often the tier was disabled
    nbytes: int  # bytes that this server has written and not deleted


class RemoteTier(CacheTier):
    """Cached blocks in a remote store. A disabled tier is tried again until the store works."""

    def __init__(
        self,
        store: RedisStore,
        fingerprint: str,
        layout: Sequence[Tensor],
        *,
        budget: int,
        ttl: int,
        secret: bytes | None = None,
        num_base: int | None = None,
    ):
        """Try the store, and go on without it if it does not work.

        Args:
            store: the store; closed with the tier.
            fingerprint: of everything that keys and values depend on besides the tokens.
            layout: see `BlockFormat`.
            budget: maximum bytes of the values that this server has written.
            ttl: seconds after its last use after which a block expires.
            secret: see `Seal`.
            num_base: see `BlockFormat`.
        """
        self._store = store
        self._format = BlockFormat(layout, num_base)
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
    def stats(self) -> RemoteStats:
        """The statistics so far."""
        with self._lock:
            return RemoteStats(
                self._up, self._read, self._written, self._writer.dropped, self._disabled, self._keys.nbytes
            )

    def should_write(self, entry: Entry) -> bool:
        """Return whether the tier is in use and the store is not known to have the block."""
        return self._up and self._key(entry) not in self._keys

    def has(self, entry: Entry) -> bool:
        """Return whether the tier is in use and the store is known to have the block."""
        return self._up and self._key(entry) in self._keys

    def refresh(self, entries: Sequence[Entry]) -> None:
        """Renew the time to live of the blocks that the store is known to have, and forget those that it has lost."""
        known = [key for key in map(self._key, entries) if key in self._keys] if self._up else []
        for start in range(0, len(known), REFRESH_KEYS):
            keys = known[start : start + REFRESH_KEYS]
            try:
                found = self._store.expire(keys, self._ttl)
            except StoreError as error:
                self._disable(str(error))
                return
            for key, is_there in zip(keys, found, strict=True):
                self._keys.add(key) if is_there else self._keys.remove(key)

    def read(self, entries: Sequence[Entry]) -> list[list[Tensor]]:
        """Return the tensors of the first of `entries`, up to the first one that is not in the store or not valid."""
        if not self._up or not entries:
            return []
        began, keys = time.monotonic(), [self._key(entry) for entry in entries]
        try:
            values = self._store.get(keys, self._max_bytes(entries[-1]), self._ttl)
        except StoreError as error:
            self._disable(str(error))
            return []
        blocks: list[list[Tensor]] = []
        for entry, key, value in zip(entries, keys, values, strict=True):
            if (block := self._decode(entry, key, value)) is None:
                break
            blocks.append(block)
        self.cost.record(time.monotonic() - began, len(blocks) or len(entries))
        with self._lock:
            self._read += len(blocks)
        return blocks

    def close(self, seconds: float | None = None) -> None:
        """Write all queued blocks and end the tier's threads. Wait at most `seconds`; None: without limit."""
        super().close(seconds)
        self._closed.set()
        self._store.close()

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics with those of this tier."""
        own = self.stats
        return replace(
            stats,
            remote_up=own.up,
            remote_read=own.read,
            remote_written=own.written,
            remote_disabled=own.disabled,
            remote_bytes=own.nbytes,
            remote_seconds=self.cost.seconds_per_block,
        )

    def _key(self, entry: Entry) -> bytes:
        return self._namespace + entry.key.hex().encode()

    def _max_bytes(self, entry: Entry) -> int:
        """Return the maximum size of a block's value. Values of blocks before it in the prefix are smaller."""
        tokens = TOKEN_TYPE.itemsize * len(entry.prefix[1])
        return self._format.tensor_bytes + tokens + MAX_HEADER_BYTES + self._seal.extra_bytes

    def _decode(self, entry: Entry, key: bytes, value: bytes) -> list[Tensor] | None:
        """Return a block; None if there is no value, it is another block with the same key, or it is not valid."""
        if not value:
            self._keys.remove(key)
            return None
        try:
            block = self._format.decode(entry, self._seal.open(key, value))
        except Exception as error:  # changed or forged; safetensors raises several types
            with self._lock:
                self._invalid.add(key)
            self._disable(f"the value of {key.decode()} is not valid: {type(error).__name__}: {error}")
            return None
        self._keys.add(key)
        return block

    def _write(self, entry: Entry, tensors: list[Tensor]) -> None:
        if not self.should_write(entry):
            return
        try:
            key = self._key(entry)
            value = self._seal.close(key, self._format.encode(entry, tensors))
            if len(value) > self._budget:
                raise StoreError(f"a block takes {len(value)} bytes, and remote_cache_gib is {self._budget} bytes")
            evicted = self._keys.evictable(len(value))
            self._store.delete(evicted)
            self._keys.remove(*evicted)
            self._keys.add(key, len(value))  # before it is written: the store may have it although the call fails
            self._store.set(key, value, self._ttl)
            with self._lock:
                self._written += 1
        except Exception as error:  # the writer must survive any error, or the queue would never empty
            self._disable(str(error))

    def _probe(self) -> None:
        """Write and read a value of a block's size. Raises StoreError."""
        self._store.connect()
        key, value = self._namespace + b"probe:" + uuid.uuid4().hex.encode(), bytes(self._format.tensor_bytes)
        self._store.set(key, value, PROBE_TTL)
        found = self._store.get([key], len(value), PROBE_TTL)
        self._store.delete([key])
        if found != [value]:
            raise StoreError("does not return what was written")

    def _disable(self, reason: str) -> None:
        """Disable the tier, and start the thread that tries it again."""
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
            self._store.address,
            reason,
        )
        threading.Thread(target=self._recover, name="remote-retry", daemon=True).start()
        self._changed()

    def _recover(self) -> None:
        """Try the store again until it works, with growing pauses, then enable the tier."""
        while not self._closed.wait(self._pause):
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS)
            try:
                self._probe()
                with self._lock:
                    invalid = list(self._invalid)
                self._store.delete(invalid)
            except StoreError as error:
                log.debug("remote_cache_url: %s: still disabled: %s", self._store.address, error)
                continue
            self.cost.reset()
            with self._lock:
                self._invalid.difference_update(invalid)
                self._up_since = time.monotonic()
                self._up = True
            log.warning("remote_cache_url: %s: the remote cache is in use again", self._store.address)
            self._changed()
            return
