"""The engine: runs generation requests on its own thread.

`Engine` is the handle that other threads use. It prepares requests, and posts everything else to `EngineCore`
(core.py), which applies it on the engine's thread, between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from paged_backend.api.errors import CannotContinue, ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.cache_event_publisher import CacheEventPublisher
from paged_backend.engine.core import PENDING, Announcement, Commit, Control, EngineCore, Phase, SleepingMemory
from paged_backend.engine.moved_blocks import BlockCopier, BlockRun
from paged_backend.engine.outputs import Emit
from paged_backend.engine.prefix_stores import PrefetchedBlocks, PrefixStores
from paged_backend.engine.sleep_mode import SleepMode
from paged_backend.execution.runner import StepRunner
from paged_backend.kv.stores.chain import StoreChain
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.stats import Stats

log = logging.getLogger("paged_llm")

STOP_SECONDS = 20.0  # time to finish the current step and to write cached blocks to the stores when the engine stops


class Engine:
    """Runs requests until it is stopped. Methods may be called from any thread, unless they say otherwise. `emit` is
    called on the engine's thread and must not block."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        emit: Emit,
        stores: StoreChain | None = None,
        *,
        adapters: AdapterRegistry | None = None,
        overlap: bool = False,
        cache_events: CacheEventPublisher | None = None,
        memory: SleepingMemory | None = None,
        blocks: BlockCopier | None = None,
    ):
        """overlap: launch a step while the previous one runs; useful if the device is not the CPU. A pipeline always
        does. cache_events: publishes changes of the prefix cache; closed with the engine. memory: what `sleep_mode`
        releases. blocks: copies the blocks of requests that move between engines; None: their tokens are computed
        again."""
        self._adapters = adapters
        self._cache_events = cache_events
        self._stores = PrefixStores(stores, scheduler.blocks, runner, self._end_prefill) if stores else None
        self._core = EngineCore(
            scheduler,
            runner,
            emit,
            self._stores,
            overlap=overlap,
            cache_events=cache_events,
            memory=memory,
            blocks=blocks,
        )
        if stores:
            stores.on_change(self._core.post_stats)
        self.sleep_mode = SleepMode(self._core, lambda: self.alive)
        self._thread = threading.Thread(target=self._core.run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop after the current step and wait for it; then write cached blocks to the stores while there is time."""
        deadline = time.monotonic() + seconds
        self._core.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("the current step has not ended after %.3g s; its thread is abandoned", seconds)
            self._core.failed.set()
        if self._stores:
            if not self._core.failed.is_set() and self._stores.spill_rest(deadline):
                self._core.emit_step()
            self._stores.close(deadline)
        if self._adapters:
            self._adapters.close(deadline - time.monotonic())
        if self._cache_events:
            self._cache_events.close()

    @property
    def alive(self) -> bool:
        """Whether the engine still runs steps."""
        return self._thread.is_alive() and not self._core.failed.is_set()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current iteration of the engine's thread began; 0 between iterations."""
        return self._core.busy_seconds

    @property
    def stats(self) -> Stats:
        """The statistics. Called on the engine's thread, or before it is started."""
        return self._core.stats

    @property
    def waiting(self) -> int:
        """The number of unfinished requests that no step has computed yet. A request whose end was asked for does not
        count, nor one that another process admitted."""
        return self._core.requests.count(Phase.ANNOUNCED, Phase.WAITING)

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._core.requests)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Announce and deliver a request."""
        self.deliver(replace(request, announcement=self.announce(request.key)))

    def announce(self, key: int, *, admitted_elsewhere: bool = False) -> Announcement:
        """Register a request that will be delivered or rejected later. It can be aborted from now on. The caller keeps
        the result until then, or stores it in the request: once nobody holds it, the request fails.

        admitted_elsewhere: whether another process admitted the request. It then does not count as `waiting`.
        """
        self._core.requests.add(key, Phase.ARRIVING if admitted_elsewhere else Phase.ANNOUNCED)
        return Announcement(self._core, key)

    def is_pending(self, key: int) -> bool:
        """Return whether an announced request has neither reached the scheduler nor been ended."""
        return self._core.requests.phase(key) in PENDING

    def withdraw(self, key: int) -> bool:
        """Forget an announced request that is not delivered. Return False if its end was asked for."""
        return self._core.requests.remove(key, PENDING)

    def deliver(self, request: GenerateRequest) -> None:
        """Run an announced request, unless its end was asked for, after its adapter is loaded and its prefix is read
        from a store. Does not block."""
        if self._adapters and request.sampling.lora_name is not None:
            self.emit_stats()
            self._adapters.run(self._load_adapter, request)
        else:
            self._prefetch(request)

    def resume(self, request: GenerateRequest) -> None:
        """Continue a request that was taken out and given back."""
        self._core.post(self._core.resume, request)

    def reject(self, key: int, error: RequestError) -> None:
        """End an announced request with an error because it cannot be delivered."""
        if self._core.requests.advance(key, Phase.ENDING, PENDING):
            self._core.post(self._core.reject, key, error)

    def abort(self, key: int) -> None:
        """Drop a request without any further output."""
        self._core.requests.advance(key, Phase.ENDING)
        self._core.post(self._core.abort, key)

    def end(self, key: int, index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        self._core.post(self._core.end, key, index)

    def end_all(self, key: int) -> None:
        """End every sample of a request. Its session keeps its blocks, unlike after `abort`."""
        self._core.requests.advance(key, Phase.ENDING)
        self._core.post(self._core.end_all, key)

    def expire(self, key: int) -> None:
        """End a running beam search and emit its hypotheses so far."""
        self._core.post(self._core.expire, key)

    def on_unknown(self, forward: Callable[[int, Control], None]) -> None:
        """Call `forward` on the engine's thread with each abort, end or expire whose request is not here."""
        self._core.on_unknown = forward

    def take_out(
        self,
        is_wanted: Callable[[GenerateRequest], bool],
        take: Callable[[GenerateRequest, Sequence[BlockRun]], None],
    ) -> None:
        """Take out the requests that another engine can continue, each with its progress.

        is_wanted: returns whether to take a request; called after the requests before it were taken. take: called with
        each request and its blocks, on the engine's thread, after all of its outputs were emitted; must call `forget`,
        and not block.
        """
        self._core.post(self._core.take_out, is_wanted, take, commit=Commit.ALL)

    def forget(self, key: int) -> None:
        """Forget a request that was taken out."""
        self._core.requests.remove(key)

    def _load_adapter(self, request: GenerateRequest) -> None:
        """Load the request's adapter. Runs on the adapters' thread."""
        assert self._adapters and request.sampling.lora_name is not None
        try:
            adapter = self._adapters.get(request.sampling.lora_name)
            if request.progress and request.progress.adapter != adapter.digest:
                raise CannotContinue(f"lora_name={request.sampling.lora_name!r}: the adapter's files have changed")
            request = replace(request, adapter=adapter)
        except RequestError as error:
            self.reject(request.key, error)
        except Exception as error:
            log.exception("request %d: could not load its adapter", request.key)
            reason = f"its adapter could not be loaded: {type(error).__name__}: {error}"
            self.reject(request.key, RequestError(ErrorCode.INTERNAL, reason))
        else:
            self._prefetch(request)

    def _prefetch(self, request: GenerateRequest) -> None:
        if self._stores and self._stores.can_prefetch(request):
            self.emit_stats()
            self._stores.prefetch(request, self._store_prefetched, self._add)
        else:
            self._add(request)

    def _store_prefetched(self, prefetched: PrefetchedBlocks) -> None:
        self._core.post(self._core.store_prefetched, prefetched)

    def _add(self, request: GenerateRequest) -> None:
        self._core.post(self._core.add, request)

    def _end_prefill(self, key: int) -> None:
        self._core.post(self._core.end_prefill, key)

    # --- everything else --------------------------------------------------------------------------------------------

    def unpin(self, session: Hashable) -> None:
        """Release the blocks that are pinned for a session."""
        self._core.post(self._core.unpin, session)

    def store(self, run: BlockRun) -> None:
        """Put blocks of another engine into the prefix cache, before their request is submitted."""
        self._core.post(self._core.store_moved, run)

    def emit_stats(self) -> None:
        """Emit statistics that include announced requests."""
        self._core.post_stats()

    def snapshot_pool(self) -> None:
        """Emit a map of the pool between two steps. Several calls before that share one map."""
        self._core.post(self._core.request_pool_map)

    def release_unused(self) -> None:
        """Release the memory of the model if no request is open. The next request restores it."""
        self._core.post(self._core.release_unused, commit=Commit.IF_IDLE)

    def fail(self, reason: str) -> None:
        """End the engine with an error that another thread detected."""
        self._core.failed.set()
        self._core.post(self._core.fail, reason)
