"""The requests of the scheduler: the waiting queue, the running batch, and the ends of requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest, TokenDelta
from paged_backend.scheduling.accounts import Accounts
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.pins import Pins
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.waiting_queue import WaitingQueue


class RequestRegistry:
    """All open requests, each either waiting or running. Keeps the accounts of tenants and the user counts of adapter
    slots up to date, and frees the blocks of requests that end."""

    def __init__(self, blocks: BlockManager, tables: BlockTables, slots: AdapterSlots, pins: Pins, accounts: Accounts):
        self.waiting = WaitingQueue()
        self.running: dict[int, Group] = {}  # running requests by key, in scheduling order
        self.num_preempted = 0  # waiting requests that were preempted
        self._blocks = blocks
        self._tables = tables
        self._slots = slots
        self._pins = pins
        self._accounts = accounts
        self._admission_indices = count()

    def add(self, request: GenerateRequest) -> None:
        """Add a new request to the waiting queue."""
        self.waiting.add(Group(request, self._accounts.open_request(request)))

    def find(self, key: int) -> Group | None:
        return self.running.get(key) or self.waiting.get(key)

    @property
    def last_running(self) -> Group:
        """The last running request in scheduling order: of those with the lowest priority, the one admitted last."""
        return next(reversed(self.running.values()))

    def admit(self, group: Group) -> None:
        """Move a request from the waiting queue to the running batch."""
        last = self.last_running if self.running else None
        self.waiting.remove(group)
        self.running[group.key] = group
        if group.request.adapter:
            self._slots.acquire(group.request.adapter)
        if group.admission_index is None:
            group.admission_index = next(self._admission_indices)
        else:
            self.num_preempted -= 1
        if last and last.scheduling_order > group.scheduling_order:
            self.running = {one.key: one for one in sorted(self.running.values(), key=lambda one: one.scheduling_order)}

    def requeue(self, group: Group) -> None:
        """Move a preempted request from the running batch to the waiting queue."""
        self._stop_running(group)
        self.num_preempted += 1
        self.waiting.add(group)

    def abort(self, group: Group) -> None:
        """Remove a request, and free its blocks."""
        self.remove(group)
        self._tables.free(group)

    def fail_group(self, group: Group, error: RequestError) -> TokenDelta:
        """End all samples of a request with an error. After an internal error, its blocks are not cached."""
        if error.code is ErrorCode.INTERNAL:
            for sequence in group.sequences:
                self._blocks.invalidate(sequence.blocks)
        self.abort(group)
        for sequence in group.sequences:
            if error.code is ErrorCode.INTERNAL:
                self._tables.states.forget_checkpoints(sequence)
            sequence.ended = True
        return TokenDelta(group.key, error=error)

    def finish_sequence(self, group: Group, sequence: Sequence) -> None:
        """End one sample, and the request with its last one. Pin the full blocks for the request's session, if it has
        one, and free the others."""
        if group.request.session is not None and sequence.blocks:
            full = sequence.committed // self._blocks.block_size
            self._pins.pin(group.request.session, sequence.blocks[:full], sequence.window_start)
        self._tables.free_sequence(sequence)
        if group.request.session in self._pins:
            self._tables.states.pin(group.request.session, sequence)
        sequence.ended = True
        group.sequences.remove(sequence)
        if not group.sequences:
            self.remove(group)

    def finish_all(self, group: Group) -> None:
        """End every sample of a request."""
        for sequence in list(group.sequences):
            self.finish_sequence(group, sequence)

    def remove(self, group: Group) -> None:
        """Remove a request that has ended, whose blocks the caller frees."""
        if group.key in self.running:
            self._stop_running(group)
        else:
            self.waiting.remove(group)
            self.num_preempted -= group.admission_index is not None
        self._accounts.close_request(group.account, was_admitted=group.admission_index is not None)

    def sequences(self) -> Iterator[Sequence]:
        for group in (*self.running.values(), *self.waiting):
            yield from group.sequences

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        running = list(self.running.values())
        assert [group.scheduling_order for group in running] == sorted(group.scheduling_order for group in running)
        self.waiting.check()
        assert not any(sequence.blocks for group in self.waiting for sequence in group.sequences)
        assert not any(sequence.host_blocks for group in running for sequence in group.sequences)
        assert self.num_preempted == sum(group.preemptions > 0 for group in self.waiting)
        self._accounts.check(
            (group.account for group in self.waiting if group.admission_index is None),
            (group.account for group in (*running, *self.waiting) if group.admission_index is not None),
        )
        self._slots.check(group.request for group in running)
        self._blocks.check(
            [*(sequence.blocks for sequence in self.sequences()), *self._pins.tables],
            [sequence.host_blocks for sequence in self.sequences()],
            [*(sequence.window_start for sequence in self.sequences()), *self._pins.starts],
        )

    def _stop_running(self, group: Group) -> None:
        del self.running[group.key]
        if group.request.adapter:
            self._slots.release(group.request.adapter)
