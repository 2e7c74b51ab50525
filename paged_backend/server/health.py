"""Whether a service can answer requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LoopThread(Protocol):
    @property
    def alive(self) -> bool: ...
    @property
    def busy_seconds(self) -> float: ...


class Health:
    """Checks that the engine's and the responder's threads live and make progress."""

    def __init__(
        self,
        engine: LoopThread,
        responder: LoopThread,
        stall_timeout: float,
        replica_problem: Callable[[], str | None] = lambda: None,
    ):
        """stall_timeout: seconds that one step, or one iteration of the responder, may take. replica_problem: returns
        why a replica cannot run requests; None if all can."""
        self._replica_problem = replica_problem
        self._engine = engine
        self._responder = responder
        self._stall_timeout = stall_timeout

    def problem(self) -> str | None:
        """Return why requests cannot be answered; None if they can."""
        if not (self._engine.alive and self._responder.alive):
            return "the engine has stopped; reload the model"
        for action, thread in (("a step", self._engine), ("sending responses", self._responder)):
            if (seconds := thread.busy_seconds) > self._stall_timeout:
                return f"{action} has taken {seconds:.0f} s, more than stall_timeout={self._stall_timeout}"
        return self._replica_problem()
