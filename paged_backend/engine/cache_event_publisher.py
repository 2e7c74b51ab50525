"""Publishes changes of the prefix cache over ZeroMQ, in vLLM's format, for routers such as NVIDIA Dynamo's.

A message has three parts: the topic, the sequence number of the batch (8 bytes, big-endian), and the batch in msgpack:

    [timestamp, [event, ...], data_parallel_rank]
    ["BlockStored", block hashes, hash of the block before them or nil, token ids, block size, LoRA id or nil, medium,
     LoRA name or nil]
    ["BlockRemoved", block hashes, medium]
    ["AllBlocksCleared"]

A subscriber that misses a number sends it to `replay_endpoint` (parts: empty, number) and gets the batches from there
on (parts: empty, number, batch), and at last the number -1 with an empty batch. vLLM counts from 0; here the first
number is the time in microseconds, so that a subscriber notices when the engine has been restarted: the numbers go on,
with a gap.
See vllm/distributed/kv_events.py and vllm/config/kv_events.py of vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from queue import Empty, Full, Queue
from typing import Any

import msgspec

from paged_backend.api.config import KvEventsConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import Origin
from paged_backend.kv.content import CacheEvent, Entry

log = logging.getLogger("paged_llm")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_SECONDS = 0.1  # time between two looks at requests for past batches while there are no events
MAX_MESSAGE_BYTES = 4096  # maximum size of what subscribers and clients send: topics and numbers
MAX_REPLAYS = 64  # clients that wait for past batches
LINGER_MILLIS = 1000  # time to send the last batches when the engine stops
HASH_BITS = 64  # vLLM's events have the low 64 bits of a block's hash
WARN_SECONDS = 60.0  # time between two equal warnings


class CacheEventPublisher:
    """Sends batches on a thread of its own."""

    def __init__(self, config: KvEventsConfig, block_size: int):
        """Bind the sockets. Raises ConfigError if an endpoint cannot be bound or a package is missing."""
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"kv_events_config: a package is missing ({error}); run pip install 'paged-llm-triton[events]'"
            ) from None
        self._pack = msgspec.msgpack.encode
        self._again = zmq.Again
        self._topic = config.topic.encode()
        self.events: list[CacheEvent] = []  # the changes to publish; belongs to the engine's thread
        self._block_size = block_size
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._replay = self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        if self._replay:  # a full queue or a client that has left is an error, and nothing is lost without one
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._non_blocking, self._error = zmq.NOBLOCK, zmq.ZMQError
        # What clients have asked for and not got yet, since the queue of a slow one is full.
        self._replays: dict[bytes, deque[tuple[bytes, bytes]]] = {}
        try:
            _bind(self._pub, "endpoint", config.endpoint, zmq.ZMQError)
            if self._replay and config.replay_endpoint:
                _bind(self._replay, "replay_endpoint", config.replay_endpoint, zmq.ZMQError)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._batches: Queue[tuple[float, list[CacheEvent]] | None] = Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = time.time_ns() // 1000
        self._next_warnings: dict[str, float] = {}  # when a message may be logged again
        self._thread = threading.Thread(target=self._run, name="cache events", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Queue the changes of full blocks since the last call, on the engine's thread. Changes that do not fit the
        queue are dropped, with a warning."""
        events = [event for event in self.events if len(event.entry.tokens) >= self._block_size]
        self.events.clear()
        if not events:
            return
        try:
            self._batches.put_nowait((time.time(), events))
        except Full:
            self._warn("KV cache events were dropped: max_queue_size of kv_events_config is too small")

    def close(self) -> None:
        """Send the queued batches and end."""
        self._batches.put(None)
        self._thread.join()
        self._context.destroy(linger=LINGER_MILLIS)

    def _run(self) -> None:
        # Blocks that a router knows of an earlier process with this endpoint are gone.
        self._send(time.time(), [["AllBlocksCleared"]])
        while True:
            try:
                batch = self._batches.get(timeout=REPLAY_SECONDS if self._replay else None)
                if batch is None:
                    return
                when, events = batch
                self._send(when, list(_encode(events, self._block_size)))
                self._answer_replays()
            except Empty:
                self._answer_replays()
            except Exception:
                log.exception("KV cache events could not be published")

    def _send(self, when: float, events: list[Any]) -> None:
        payload, number = self._pack([when, events, 0]), self._sequence
        self._sequence += 1
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer_replays(self) -> None:
        if self._replay:
            self._read_requests()
            self._send_past()

    def _read_requests(self) -> None:
        assert self._replay
        while True:
            try:
                parts = self._replay.recv_multipart(self._non_blocking)
            except self._again:
                return
            if len(parts) != 3 or len(parts[2]) != 8:
                self._warn(
                    "a request for past KV cache events has %d parts; must be an empty one and 8 bytes", len(parts)
                )
                continue
            if parts[0] not in self._replays and len(self._replays) >= MAX_REPLAYS:
                self._warn("%d clients wait for past KV cache events, the limit; one more is ignored", MAX_REPLAYS)
                continue
            wanted, first = self._replays.setdefault(parts[0], deque()), int.from_bytes(parts[2], "big")
            if len(wanted) > len(self._sent):
                self._warn("a client that does not read past KV cache events asks for more of them; it is ignored")
                continue
            wanted += [(number.to_bytes(8, "big"), payload) for number, payload in self._sent if number >= first]
            wanted.append((END_OF_REPLAY, b""))

    def _send_past(self) -> None:
        """Send what clients have asked for, as far as their queues have room."""
        assert self._replay
        for client, wanted in list(self._replays.items()):
            try:
                while wanted:
                    self._replay.send_multipart((client, b"", *wanted[0]), self._non_blocking)
                    wanted.popleft()
            except self._again:  # its queue is full
                continue
            except self._error as error:
                self._warn("a client that asked for past KV cache events has left: %s", error)
            del self._replays[client]

    def _warn(self, message: str, *arguments: object) -> None:
        """Log a warning that clients can cause as often as they like, once in a while."""
        if (now := time.monotonic()) >= self._next_warnings.get(message, 0.0):
            self._next_warnings[message] = now + WARN_SECONDS
            log.warning(message, *arguments)


def _bind(socket: Any, name: str, endpoint: str, error_class: type[Exception]) -> None:
    try:
        socket.bind(endpoint)
    except error_class as error:
        raise ConfigError(f'kv_events_config.{name}="{endpoint}": {error}') from None


def _encode(events: Sequence[CacheEvent], block_size: int) -> Iterable[list[Any]]:
    """Yield vLLM's events. Blocks that follow one another in a prefix share an event. So do removed blocks."""
    start = 0
    for end in range(1, len(events) + 1):
        if end == len(events) or not _continues(events[end - 1], events[end]):
            yield _event(events[start:end], block_size)
            start = end


def _continues(before: CacheEvent, event: CacheEvent) -> bool:
    same = (before.stored, before.medium) == (event.stored, event.medium)
    return same and (not event.stored or event.entry.parent is before.entry)


def _event(events: Sequence[CacheEvent], block_size: int) -> list[Any]:
    first, hashes = events[0], [_hash(event.entry) for event in events]
    if not first.stored:
        return ["BlockRemoved", hashes, first.medium]
    parent = first.entry.parent
    tokens = [token for event in events for token in event.entry.tokens]
    before = None if isinstance(parent, Origin) else _hash(parent)
    adapter = _adapter(first.entry)
    lora = (int.from_bytes(adapter[:4], "big"), adapter.hex()) if adapter else (None, None)
    return ["BlockStored", hashes, before, tokens, block_size, lora[0], first.medium, lora[1]]


def _hash(entry: Entry) -> int:
    return int.from_bytes(entry.key, "big") & ((1 << HASH_BITS) - 1)


def _adapter(entry: Entry) -> bytes:
    """Return the digest of the adapter of a block; empty without one."""
    parent = entry.parent
    while isinstance(parent, Entry):
        parent = parent.parent
    return parent.adapter
