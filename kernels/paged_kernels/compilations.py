"""Counts the Triton kernels that are compiled while the model serves requests. Imports no triton without a GPU."""

import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("paged_llm.kernels")


class Compilations:
    """The number of kernels that were compiled, or loaded from Triton's cache, since `watch` was called.

    Each of them delays a step, and all requests in it. The warm-up should therefore compile every kernel of a step.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Callable[..., bool | None] | None = None  # another hook, which is still called
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Start to count, and to log the names. Called when the model is ready, once per process or more often."""
        from triton import knobs

        previous = knobs.runtime.jit_post_compile_hook
        if getattr(previous, "__self__", None) is not self:
            self._previous = previous
            knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **details: Any) -> bool | None:
        """Count a kernel: Triton calls this after it has compiled one."""
        with self._lock:
            self.count += 1
        log.warning("a kernel was compiled after the model was ready, which delayed a step: %s", details["repr"])
        return self._previous(**details) if self._previous else None


after_ready = Compilations()
