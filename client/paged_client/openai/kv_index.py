"""Knows how much of a prompt each server has cached: NVIDIA Dynamo's indexer, which reads events of the servers.

They publish them with `kv_events_config`. See the standalone selection service of Dynamo, `ai-dynamo-runtime`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence

from paged_client.types import PagedError

log = logging.getLogger("paged_client")

MODEL = "model"  # Dynamo's indexer can have several; here all servers have the same
RETRY_SECONDS = 1.0  # between two attempts to reach servers
_ENDPOINT = re.compile(r"tcp://\S+:\d+|ipc://\S+")

Tokenize = Callable[[str, bool], Sequence[int]]  # of a text, and whether to add special tokens


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
        self._block_size = 0  # of the servers; 0: none has been reached
        self._service = SelectionService(indexer_threads=1)

    async def run(self, block_size: Callable[[int], Awaitable[int]]) -> None:
        """Subscribe to the events of each server, as soon as it can be reached.

        Args:
            block_size: asks a server, by its index, for the tokens per block. Raises PagedError if it does not answer.
        """
        missing = list(range(len(self._endpoints)))
        while missing:
            for server in missing[:]:
                try:
                    await self._subscribe(server, await block_size(server))
                    missing.remove(server)
                except PagedError:
                    pass
            await asyncio.sleep(RETRY_SECONDS if missing else 0)

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


def _parse(endpoints: str) -> tuple[str, str]:
    events, _, replay = endpoints.partition(",")
    if not (_ENDPOINT.fullmatch(events) and _ENDPOINT.fullmatch(replay)):
        raise ValueError(
            f"kv-events {endpoints}: must be two ZeroMQ endpoints, as in tcp://server:5557,tcp://server:5558"
        )
    return events, replay
