"""Clients that wait for a map of the block pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.outputs import PoolMap
from paged_backend.server.wire.channel import Channel, respond
from paged_backend.server.wire.responses import write_pool_map


@dataclass(frozen=True, eq=False)
class _Waiting:
    channel: Channel
    arrived: float  # time.monotonic()


class PoolMapRequests:
    """Pool map requests in order of arrival; the engine's next map answers all of them."""

    def __init__(self, timeout_seconds: float, max_model_len: int | None = None):
        """max_model_len: the context length, which the maps contain."""
        self._max_model_len = max_model_len
        self._timeout_seconds = timeout_seconds
        self._waiting: list[_Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, channel: Channel, arrived: float) -> None:
        self._waiting.append(_Waiting(channel, arrived))

    def answer(self, pool: PoolMap) -> None:
        outputs = write_pool_map(
            {
                "time": pool.taken_at,
                "block_size": pool.stats.block_size,
                "num_blocks": pool.stats.blocks_total,
                "states": pool.states,
                "state_slots": pool.state_slots,
                "running": pool.stats.running,
                "waiting": pool.stats.waiting,
                "tokens": pool.tokens,
                "cached_tokens_hit": pool.stats.cached_tokens,
                "preemptions": pool.stats.preemptions,
                "max_model_len": self._max_model_len,
                "sleeping": pool.stats.sleeping,
            }
        )
        self._answer_all(lambda channel: channel.send(outputs, final=True))

    def fail(self, error: RequestError) -> None:
        self._answer_all(lambda channel: channel.fail(error))

    def end_overdue(self, now: float) -> None:
        """Fail requests older than the timeout: an engine that hangs must not keep the server from stopping."""
        reason = f"the engine has not reported its block pool within {self._timeout_seconds:g} s"
        error = RequestError(ErrorCode.UNAVAILABLE, reason)
        while self._waiting and now > self._waiting[0].arrived + self._timeout_seconds:
            channel = self._waiting.pop(0).channel
            respond(channel, lambda channel=channel: channel.fail(error))  # type: ignore[misc]

    def _answer_all(self, answer: Callable[[Channel], None]) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            respond(request.channel, lambda request=request: answer(request.channel))  # type: ignore[misc]
