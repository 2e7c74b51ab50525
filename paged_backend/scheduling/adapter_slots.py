"""The LoRA adapters that the device holds. Integers only; the runner loads the factors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.api.request import Adapter, GenerateRequest


class AdapterLoad(NamedTuple):
    """An adapter that has to be loaded into a slot before the step."""

    slot: int
    adapter: Adapter


@dataclass
class _HeldAdapter:
    slot: int
    adapter: Adapter
    num_users: int = 0  # running requests that use it


class AdapterSlots:
    """A fixed number of slots, each of which holds one adapter.

    Adapters without running requests are evicted, the least recently used first. Adapters with the same content share a
    slot. Owned by the scheduler; `resident` may be read from any thread.
    """

    def __init__(self, count: int):
        self._free = list(range(count))
        self._held: OrderedDict[bytes, _HeldAdapter] = OrderedDict()  # adapters by digest, oldest use first
        self._loads: dict[int, Adapter] = {}  # assigned adapters that are not on the device yet, by slot
        self._num_users = 0
        self.resident: tuple[Adapter, ...] = ()  # adapters on the device; replaced as a whole, never changed

    def has_room(self, adapter: Adapter) -> bool:
        """Return whether `acquire` would succeed: the adapter has a slot, or one is free or can be evicted."""
        return adapter.digest in self._held or bool(self._free) or self._evictable is not None

    def acquire(self, adapter: Adapter) -> None:
        """Count a running request that uses the adapter, and give the adapter a slot if it has none. There must be
        room."""
        if adapter.digest not in self._held:
            self._assign(adapter)
        self._held[adapter.digest].num_users += 1
        self._held.move_to_end(adapter.digest)
        self._num_users += 1

    def release(self, adapter: Adapter) -> None:
        """Count that a request with this adapter does not run any more. The adapter keeps its slot until evicted."""
        held = self._held[adapter.digest]
        held.num_users -= 1
        self._num_users -= 1
        assert held.num_users >= 0

    def slots_of(self, requests: Iterable[GenerateRequest]) -> dict[bytes, int]:
        """Return the slots of the adapters that these requests use, by digest."""
        if not self._num_users:
            return {}
        digests = {request.adapter.digest for request in requests if request.adapter}
        return {digest: self._held[digest].slot for digest in digests}

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the adapters to load before the next step, and forget them."""
        if not self._loads:
            return ()
        loads = tuple(AdapterLoad(slot, adapter) for slot, adapter in self._loads.items())
        self._loads.clear()
        return loads

    def fail(self, loads: Iterable[AdapterLoad]) -> None:
        """Handle loads whose step failed: load each adapter again, or free its slot if no request uses it. Called after
        the requests of that step have ended."""
        for load in loads:
            held = self._held.get(load.adapter.digest)
            if held is None or held.slot != load.slot:
                continue
            if held.num_users:
                self._loads[load.slot] = load.adapter
            else:
                self._free.append(self._evict(load.adapter.digest))
                self._publish()

    def check(self, running: Iterable[GenerateRequest]) -> None:
        """Assert every invariant. For tests and idle moments."""
        slots = [held.slot for held in self._held.values()]
        assert len({*slots, *self._free}) == len(slots) + len(self._free), "a slot is used twice"
        users = [request.adapter.digest for request in running if request.adapter]
        assert all(held.num_users == users.count(digest) for digest, held in self._held.items()), "users miscounted"
        assert self._num_users == len(users), "users miscounted"

    @property
    def _evictable(self) -> bytes | None:
        return next((digest for digest, held in self._held.items() if not held.num_users), None)

    def _assign(self, adapter: Adapter) -> None:
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            evicted = self._evictable
            assert evicted is not None, "an adapter without a slot"
            slot = self._evict(evicted)
        self._held[adapter.digest] = _HeldAdapter(slot, adapter)
        self._loads[slot] = adapter
        self._publish()

    def _evict(self, digest: bytes) -> int:
        slot = self._held.pop(digest).slot
        self._loads.pop(slot, None)
        return slot

    def _publish(self) -> None:
        self.resident = tuple(held.adapter for held in self._held.values())
