"""Batch admission: selects the waiting requests that join the running batch in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.scheduling.accounts import Accounts
from paged_backend.scheduling.adapter_slots import AdapterSlots
from paged_backend.scheduling.block_demand import BlockDemand, Demand
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.chunk_planner import ChunkPlanner
from paged_backend.scheduling.mask_budget import MaskBudget
from paged_backend.scheduling.pins import Pins
from paged_backend.scheduling.plan import NO_BLOCKS
from paged_backend.scheduling.plan_builder import PlanBuilder
from paged_backend.scheduling.preemption import Preemption
from paged_backend.scheduling.prefix_cache import CacheHit
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group
from paged_backend.scheduling.stats import SchedulerCounters


@dataclass
class _Capacity:
    """The sequences and blocks that are left for waiting requests in this step."""

    num_seqs: int
    reserved_blocks: int  # blocks that running requests still need for their tokens


class BatchAdmission:
    """Admits waiting requests in order, and preempts requests of lower priority for them."""

    def __init__(
        self,
        requests: RequestRegistry,
        blocks: BlockManager,
        tables: BlockTables,
        demand: BlockDemand,
        slots: AdapterSlots,
        pins: Pins,
        accounts: Accounts,
        planner: ChunkPlanner,
        preemption: Preemption,
        masks: MaskBudget,
        counters: SchedulerCounters,
        clock: Callable[[], float],
        *,
        max_num_seqs: int,
        whole_prompts: bool = False,
    ):
        """whole_prompts: whether a prompt is computed in one step, because its tokens attend to later ones."""
        self._requests = requests
        self._blocks = blocks
        self._tables = tables
        self._demand = demand
        self._slots = slots
        self._pins = pins
        self._accounts = accounts
        self._planner = planner
        self._preemption = preemption
        self._masks = masks
        self._counters = counters
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._whole_prompts = whole_prompts

    def admit(self, builder: PlanBuilder) -> None:
        """Admit waiting requests until the next one does not fit.

        A request is admitted only if the blocks for all of its tokens are available and not reserved for prompts that
        are still being computed. This keeps prompts from preempting each other during prefill. A request that has
        output already, such as a preempted one, also waits for its masks.
        """
        self._masks.renew()
        capacity = self._capacity() if self._requests.waiting else _Capacity(0, 0)
        while builder.budget > 0 and (group := self._next()):
            if self._whole_prompts and group.prefill_len > builder.budget:
                return
            self._masks.prepare([group])
            if any(sequence.needs_mask for sequence in group.sequences):
                return
            self._tables.scores.take(group)
            if not builder.scored_budget and group.unscored(0, group.leader.num_prompt):
                return
            slot_users = self._preemptible_slot_users(group)
            demand = self._demand.demand(group) if group.num_seqs <= capacity.num_seqs else None
            hit = self._demand.fit(demand, capacity.reserved_blocks) if demand and not slot_users else None
            if hit is not None:
                self._enter(group, hit, builder)
                capacity.num_seqs -= group.num_seqs
                capacity.reserved_blocks += self._demand.reserved(group)
            elif self._requests.running and not self._would_fit(group, capacity, demand):
                return
            elif demand and not slot_users and self._pins.drop_oldest():
                continue  # unpins idle sessions before any request is preempted
            elif builder.in_flight:
                builder.blocked = True
                return
            elif self._requests.running:
                for preempted in slot_users or [self._requests.last_running]:
                    self._preemption.preempt(preempted, builder)
                capacity = self._capacity()
            else:
                return

    def _next(self) -> Group | None:
        """Return the next request. If its adapter has no slot and none can be freed by preemption, return the first
        request without an adapter. Another adapter request could keep the slots occupied and starve this one."""
        first = self._requests.waiting.first()
        if first is None or self._has_slot(first) or self._preemptible_slot_users(first):
            return first
        return self._requests.waiting.first_without_adapter()

    def _has_slot(self, group: Group) -> bool:
        return group.request.adapter is None or self._slots.has_room(group.request.adapter)

    def _preemptible_slot_users(self, group: Group) -> list[Group]:
        """Return the running requests to preempt so that the group's adapter gets a slot: all users of one adapter,
        each of a lower priority than the group.

        Of several such adapters, take the one whose first user has the lowest priority, then the one with the fewest
        users. Empty if the group needs no slot, one is available, or there is no such adapter.
        """
        if self._has_slot(group):
            return []
        users: dict[bytes, list[Group]] = {}
        for one in self._requests.running.values():  # iterates in scheduling order
            if one.request.adapter:
                users.setdefault(one.request.adapter.digest, []).append(one)
        lower = (ones for ones in users.values() if ones[0].priority > group.priority)
        return max(lower, key=lambda ones: (ones[0].priority, -len(ones), ones[0].scheduling_order), default=[])

    def _would_fit(self, group: Group, capacity: _Capacity, demand: Demand | None) -> bool:
        """Return whether a request would fit if all requests of lower priority were preempted and all sessions
        unpinned."""
        lower = [one for one in self._requests.running.values() if one.priority > group.priority]
        if not lower or group.num_seqs > capacity.num_seqs + sum(one.num_seqs for one in lower):
            return False
        tables = [sequence.blocks for one in lower for sequence in one.sequences] + self._pins.tables
        reserved = capacity.reserved_blocks - sum(map(self._demand.reserved, lower))
        needed = (demand or self._demand.demand(group)).num_blocks
        return needed <= self._blocks.num_available + self._blocks.pool.num_freed_by(tables) - reserved

    def _capacity(self) -> _Capacity:
        running = self._requests.running.values()
        return _Capacity(
            num_seqs=self._max_num_seqs - sum(group.num_seqs for group in running),
            reserved_blocks=sum(map(self._demand.reserved, running)),
        )

    def _enter(self, group: Group, hit: CacheHit, builder: PlanBuilder) -> None:
        """Admit a request that fits, and plan its first chunk."""
        is_new = group.admission_index is None
        self._requests.admit(group)
        if not is_new:
            self._end_preemption(group)
        if group.is_swapped:
            self._tables.swap_in(group, builder)
            for sequence in group.active:
                self._planner.extend(group, sequence, builder)
            return
        self._tables.adopt(group, hit, builder)
        leader = group.leader
        length = min(group.prefill_len - leader.computed, builder.budget)
        if group.scores_prompt:
            length = builder.limit_scored(group, leader.computed, length)
        length = self._tables.states.chunk_length(leader.computed, length, group.prefill_len)
        self._tables.grow(group, leader.computed + length)
        if is_new:
            builder.admitted.append(group.key)
            self._accounts.admit_request(group.account, group.prefill_len - leader.computed)
            self._count_hit(group, hit)
        builder.add_chunk(group, leader, length, NO_BLOCKS)

    def _end_preemption(self, group: Group) -> None:
        now = self._clock()
        group.preempted_seconds += now - group.preempted_at
        if trace := group.request.trace:
            kind = "swap" if group.is_swapped else "recompute"
            trace.add("preempted", group.preempted_at, now, **{"paged_llm.kind": kind})

    def _count_hit(self, group: Group, hit: CacheHit) -> None:
        size = self._blocks.block_size
        group.cached_tokens = group.leader.computed
        self._counters.queried_tokens += group.prefill_len
        self._counters.cached_tokens += group.cached_tokens
        self._counters.host_tokens += size * (len(hit.blocks) - len(hit.device_blocks))
        if hit.partial is not None and hit.partial.on_host:
            self._counters.host_tokens += hit.partial_tokens
