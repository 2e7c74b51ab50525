"""Knows how much of a prompt each server has cached: NVIDIA Dynamo's indexer, which reads events of the servers.

They publish them with `kv_events_config`. See the standalone selection service of Dynamo, `ai-dynamo-runtime`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from paged_client.types import PagedError, PoolMap

log = logging.getLogger("paged_client")

MODEL = "model"  # Dynamo's indexer can have several; here all servers have the same
RETRY_SECONDS = 1.0  # time between two attempts to reach servers
SILENT_SECONDS = 30.0  # time after which a server that has cached blocks should have sent events
MIN_CACHED = 16  # blocks that it has then cached at least: there are no events of partly filled blocks
_ENDPOINT = re.compile(r"tcp://\S+:\d+|ipc://\S+")

Tokenize = Callable[[str, bool], Sequence[int]]  # (text, whether to add special tokens) -> token ids


class KvIndex:
    """The blocks that each server has cached.

    Args:
        endpoints: for each server, the ZeroMQ endpoints of its events and of past events, separated by a comma.
        tokenize: the tokenizer of the model.

    Raises ValueError for invalid endpoints, and without the package ai-dynamo-runtime.
    """

    def __init__(self, endpoints: Sequence[str], tokenize: Tokenize) -> None:
        os.environ.setdefault("DYN_LOG", "error")  # its warnings say that past events are requested, which is normal
        try:
            from dynamo._core import SelectionService
        except ImportError as error:
            raise ValueError(
                f"kv-events: a package is missing ({error}); run pip install 'paged-llm-triton[routing]'"
            ) from None
        self._endpoints = [_parse(endpoint) for endpoint in endpoints]
        self._tokenize = tokenize
        self._block_size = 0  # block size of the servers; 0: no server has been reached
        self._silent: dict[int, float] = {}  # servers of which no event is known, and when to look at them again
        self._service = SelectionService(indexer_threads=1)

    async def run(self, pool: Callable[[int], Awaitable[PoolMap]]) -> None:
        """Subscribe to the events of each server, as soon as it can be reached. Warn if there are no events.

        Args:
            pool: asks a server, by its index, for its block pool. Raises PagedError if it does not answer.
        """
        missing = list(range(len(self._endpoints)))
        while missing or self._silent:
            for server in missing[:]:
                with suppress(PagedError):
                    await self._subscribe(server, (await pool(server)).block_size)
                    missing.remove(server)
            for server, due in list(self._silent.items()):
                if time.monotonic() > due:
                    with suppress(PagedError):
                        await self._check(server, pool)
            await asyncio.sleep(RETRY_SECONDS if missing or self._silent else 0)

    async def cached(self, prompt: str | Sequence[int], *, special_tokens: bool) -> list[float]:
        """Return the share of the prompt, from 0 to 1, that each server has cached.

        Args:
            prompt: text or token ids.
            special_tokens: whether the server adds special tokens to a text, such as the one that begins a sequence.
        """
        shares = [0.0] * len(self._endpoints)
        if not self._block_size:
            return shares
        tokens = await asyncio.to_thread(self._tokenize, prompt, special_tokens) if isinstance(prompt, str) else prompt
        if len(tokens) < self._block_size:
            return shares
        scores = await self._service.overlap_scores({"model_name": MODEL, "token_ids": list(tokens)})
        for worker in scores["workers"]:
            shares[worker["worker_id"]] = worker["host_pinned_blocks"] * self._block_size / len(tokens)
            if worker["host_pinned_blocks"]:
                self._silent.pop(worker["worker_id"], None)
        return shares

    def close(self) -> None:
        self._service.shutdown()

    async def _subscribe(self, server: int, block_size: int) -> None:
        if self._block_size not in (0, block_size):
            log.warning(
                "server %d has block_size=%d, others have %d; what it has cached is not considered",
                server,
                block_size,
                self._block_size,
            )
            return
        events, replay = self._endpoints[server]
        worker = {"worker_id": server, "model_name": MODEL, "endpoint": f"server-{server}", "block_size": block_size}
        await self._service.upsert_worker(worker | {"kv_events_endpoint": events, "replay_endpoint": replay})
        self._block_size = block_size
        self._silent[server] = time.monotonic() + SILENT_SECONDS

    async def _check(self, server: int, pool: Callable[[int], Awaitable[PoolMap]]) -> None:
        """Warn if a server has cached blocks and none of them is known. Look again later if it has not."""
        self._silent[server] = time.monotonic() + SILENT_SECONDS
        num_cached = (await pool(server)).states.count("c")
        if num_cached < MIN_CACHED or server not in self._silent:
            return
        del self._silent[server]
        # The snapshot is large, so it is taken once for a server. The stub of the package lacks it.
        snapshot = await self._service.indexer_snapshot()  # type: ignore[attr-defined]
        if all(event["worker_id"] != server for index in snapshot.values() for event in index["events"]):
            log.warning(
                "server %d has cached %d blocks, but no events arrive from %s; check its option kv_events_config and"
                " --kv-events. Until then requests are sent to it as without events",
                server,
                num_cached,
                " and ".join(self._endpoints[server]),
            )


def _parse(endpoints: str) -> tuple[str, str]:
    events, _, replay = endpoints.partition(",")
    if not (_ENDPOINT.fullmatch(events) and _ENDPOINT.fullmatch(replay)):
        raise ValueError(
            f"kv-events {endpoints}: must be two ZeroMQ endpoints, as in tcp://server:5557,tcp://server:5558"
        )
    return events, replay
