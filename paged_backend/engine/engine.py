"""The engine: runs generation requests on its own thread.

`Engine` is the handle that other threads use. Each of its methods posts a message (`messages.py`) to the inbox of the
step loop (`step_loop.py`), which applies it between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable
from queue import SimpleQueue

from paged_backend.api.errors import RequestError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.engine.messages import (
    AbortRequest,
    EmitStats,
    EndBeamSearch,
    EndSamples,
    FailEngine,
    Message,
    PrefillStored,
    RejectRequest,
    ReportUnknown,
    SnapshotPool,
    TiersChanged,
    UnpinSession,
)
from paged_backend.engine.moved_blocks import BlockCopier
from paged_backend.engine.moved_requests import MovedRequests
from paged_backend.engine.outputs import Emit
from paged_backend.engine.prefix_tiers import PrefixTiers
from paged_backend.engine.request_preparation import RequestPreparation
from paged_backend.engine.sleep_mode import SleepMode
from paged_backend.engine.state import EngineState, SleepingMemory
from paged_backend.engine.step_loop import StepLoop
from paged_backend.execution.runner import StepRunner
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.scheduling.scheduler import Scheduler

log = logging.getLogger("paged_llm")

STOP_SECONDS = 20.0  # time to finish the current step and to write cached blocks to the tiers when the engine stops


class Engine:
    """Runs requests until it is stopped. `submit` and `announce` may be called from one thread at a time, the other
    methods from any. `emit` is called on the engine's thread and must not block."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Emit,
        tiers: StoreChain | None = None,
        *,
        adapters: AdapterRegistry | None = None,
        overlap: bool = False,
        cache_events: CacheEventPublisher | None = None,
        memory: SleepingMemory | None = None,
        blocks: BlockCopier | None = None,
    ):
        """overlap: launch a step while the previous one runs; useful if the device is not the CPU. cache_events:
        publishes changes of the prefix cache; closed with the engine. memory: what `sleep_mode` releases. blocks:
        copies those of requests that move between engines; None: their tokens are computed again."""
        self._inbox: SimpleQueue[Message | None] = SimpleQueue()
        self._queued: set[int] = set()  # keys of unfinished requests that no step has computed yet
        self._failed = threading.Event()  # set when no further step can be run
        self._adapters = adapters
        self._prefix_tiers = None
        if tiers:
            self._prefix_tiers = PrefixTiers(
                tiers, scheduler.blocks, runner, lambda key: self._inbox.put(PrefillStored(key))
            )
            tiers.on_change(lambda: self._inbox.put(TiersChanged()))
        self._cache_events = cache_events
        self._state = EngineState(
            scheduler,
            emit,
            self._prefix_tiers,
            cache_events=cache_events,
            memory=memory,
            queued=self._queued,
            blocks=blocks,
        )
        self.moved_requests = MovedRequests(self._inbox.put, self._state)
        self.sleep_mode = SleepMode(self._inbox.put, lambda: self.alive)
        self._preparation = RequestPreparation(self._inbox.put, self.reject, adapters, self._prefix_tiers)
        self._loop = StepLoop(
            self._state, runner, self._inbox, queued=self._queued, failed=self._failed, overlap=overlap
        )
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop after the current step and wait for it; then write cached blocks to the tiers while there is time."""
        deadline = time.monotonic() + seconds
        self._inbox.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("the current step has not ended after %.3g s; its thread is abandoned", seconds)
            self._failed.set()
        if self._prefix_tiers:
            if not self._failed.is_set() and self._prefix_tiers.spill_rest(deadline):
                self._state.emit_step()
            self._prefix_tiers.close(deadline)
        if self._adapters:
            self._adapters.close(deadline - time.monotonic())
        if self._cache_events:
            self._cache_events.close()

    @property
    def alive(self) -> bool:
        """Whether the engine still runs steps."""
        return self._thread.is_alive() and not self._failed.is_set()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current iteration of the step loop began; 0 between iterations."""
        return self._loop.busy_seconds

    @property
    def waiting(self) -> int:
        """The number of unfinished requests that no step has computed yet. A request that is ended before it is
        computed no longer counts, even if the loop has not seen the message yet."""
        return len(self._queued)

    def submit(self, request: GenerateRequest) -> None:
        """Announce and deliver a request."""
        self.announce(request.key)
        self.deliver(request)

    def announce(self, key: int) -> None:
        """Register a request that will be delivered or rejected later. It can be aborted from now on."""
        self._queued.add(key)
        self._state.announced.add(key)

    def is_pending(self, key: int) -> bool:
        """Return whether an announced request has neither reached the scheduler nor been aborted."""
        return key in self._state.announced

    def deliver(self, request: GenerateRequest) -> None:
        """Run an announced request, unless it was aborted."""
        self._preparation.deliver(request)

    def reject(self, key: int, error: RequestError) -> None:
        """End an announced request with an error because it cannot be delivered."""
        self._queued.discard(key)
        self._inbox.put(RejectRequest(key, error))

    def abort(self, key: int) -> None:
        """Drop a request without any further output."""
        self._queued.discard(key)
        self._inbox.put(AbortRequest(key))

    def end(self, key: int, index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        self._inbox.put(EndSamples(key, index))

    def end_all(self, key: int) -> None:
        """End every sample of a request. Its session keeps its blocks, unlike after `abort`."""
        self._queued.discard(key)
        self._inbox.put(EndSamples(key, None))

    def expire(self, key: int) -> None:
        """End a running beam search and emit its hypotheses so far."""
        self._inbox.put(EndBeamSearch(key))

    def unpin(self, session: Hashable) -> None:
        """Release the blocks that are pinned for a session."""
        self._inbox.put(UnpinSession(session))

    def fail(self, reason: str) -> None:
        """End the engine with an error that another thread detected."""
        self._failed.set()
        self._inbox.put(FailEngine(reason))

    def emit_stats(self) -> None:
        """Emit statistics that include announced requests."""
        self._inbox.put(EmitStats())

    def report_unknown(self, keys: tuple[int, ...]) -> None:
        """Emit the keys among `keys` that the engine does not track, after all outputs emitted so far."""
        self._inbox.put(ReportUnknown(keys))

    def snapshot_pool(self) -> None:
        """Emit a map of the pool between two steps. Several calls before that get one map."""
        self._inbox.put(SnapshotPool())
