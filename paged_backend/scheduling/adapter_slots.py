"""Which adapters the device holds. Integers only: whoever computes puts them there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.api.request import Adapter, GenerateRequest


class Load(NamedTuple):
    """An adapter that a slot is to hold from this step on."""

    slot: int
    adapter: Adapter


@dataclass
class _Held:
    slot: int
    adapter: Adapter
    users: int = 0  # requests that run with it


class AdapterSlots:
    """Slots for adapters, the least recently used first. One that a running request uses stays; what is evicted is
    nobody's. Adapters of equal content are one. Owned by the scheduler; `resident` may be read from any thread."""

    def __init__(self, count: int):
        self._free = list(range(count))
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # by content, the least recently used first
        self._loads: dict[int, Adapter] = {}  # not yet on the device
        self._users = 0
        self.resident: tuple[Adapter, ...] = ()  # replaced whole

    def has_room(self, adapter: Adapter) -> bool:
        return adapter.digest in self._held or bool(self._free) or self._evictable is not None

    def take(self, adapter: Adapter) -> None:
        """For a request that begins to run. There must be room."""
        if adapter.digest not in self._held:
            self._put(adapter)
        self._held[adapter.digest].users += 1
        self._held.move_to_end(adapter.digest)
        self._users += 1

    def leave(self, adapter: Adapter) -> None:
        """For a request that ran: it ended, or waits again."""
        held = self._held[adapter.digest]
        held.users -= 1
        self._users -= 1
        assert held.users >= 0

    def of(self, requests: Iterable[GenerateRequest]) -> dict[bytes, int]:
        """The slots of those that use one, by content."""
        if not self._users:
            return {}
        digests = {request.adapter.digest for request in requests if request.adapter}
        return {digest: self._held[digest].slot for digest in digests}

    def take_loads(self) -> tuple[Load, ...]:
        """What must be put on the device before the next step."""
        if not self._loads:
            return ()
        loads = tuple(Load(slot, adapter) for slot, adapter in self._loads.items())
        self._loads.clear()
        return loads

    def fail(self, loads: Iterable[Load]) -> None:
        """Those may not be on the device. After the requests of that step have ended."""
        for load in loads:
            held = self._held.get(load.adapter.digest)
            if held is None or held.slot != load.slot:
                continue
            if held.users:
                self._loads[load.slot] = load.adapter
            else:
                self._free.append(self._drop(load.adapter.digest))
                self._publish()

    def check(self, running: Iterable[GenerateRequest]) -> None:
        """Assert every invariant; for tests and idle moments."""
        slots = [held.slot for held in self._held.values()]
        assert len({*slots, *self._free}) == len(slots) + len(self._free), "a slot twice"
        users = [request.adapter.digest for request in running if request.adapter]
        assert all(held.users == users.count(digest) for digest, held in self._held.items()), "users miscounted"
        assert self._users == len(users), "users miscounted"

    @property
    def _evictable(self) -> bytes | None:
        return next((digest for digest, held in self._held.items() if not held.users), None)

    def _put(self, adapter: Adapter) -> None:
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            evicted = self._evictable
            assert evicted is not None, "an adapter without a slot"
            slot = self._drop(evicted)
        self._held[adapter.digest] = _Held(slot, adapter)
        self._loads[slot] = adapter
        self._publish()

    def _drop(self, digest: bytes) -> int:
        slot = self._held.pop(digest).slot
        self._loads.pop(slot, None)
        return slot

    def _publish(self) -> None:
        self.resident = tuple(held.adapter for held in self._held.values())
