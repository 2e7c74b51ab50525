"""A stand-in for a model with recurrent layers: the slots of the shadow store, and a digest of all tokens per state.

A sequence that continues from another state than that of its own tokens is detected.
"""

from __future__ import annotations

from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.plan import Plan, StepResult
from paged_backend.scheduling.scheduler import Scheduler
from tests.support.shadow import ShadowStore, extend, start


class ShadowStates(ShadowStore):
    """The slots of the pool and of the states, and a forward pass over them."""

    def __init__(self, scheduler: Scheduler, vocab: int, num_slots: int, num_host_slots: int = 0):
        super().__init__(scheduler, vocab)
        self.states: list[bytes | None] = [None] * num_slots
        self.host_states: list[bytes | None] = [None] * num_host_slots
        self.num_copies = 0
        self.num_swapped_in = 0

    def run(self, plan: Plan) -> StepResult:
        self._copy_states(plan)
        used = [slot for chunk in plan.chunks for slot in (chunk.sequence.state_slot, *chunk.draft_slots)]
        assert len(set(used)) == len(used)
        for chunk in plan.chunks:
            sequence, slot = chunk.sequence, chunk.sequence.state_slot
            assert slot is not None
            state = self.states[slot] if chunk.start else start(sequence.request)
            assert state == self._digest(sequence, chunk.start), (sequence.key, sequence.index, chunk.start)
            drafts = dict(enumerate(chunk.draft_slots, chunk.first_sampled))  # the slot of each draft token's position
            assert len(drafts) == len(chunk.draft_tokens)
            for position in range(chunk.start, chunk.start + chunk.length):
                state = extend(state, self._token(sequence, position))
                self.states[drafts.get(position, slot)] = state
        return super().run(plan)

    def _copy_states(self, plan: Plan) -> None:
        """Move states to the host, then from the host, then copy states within the device, all at once."""
        moved, device, host = plan.state_transfers, self.states, self.host_states
        for part, sources, targets in (
            (moved.moves_out, device, host), (moved.moves_in, host, device), (moved.copies, device, device)
        ):  # fmt: skip
            assert len({one.target for one in part}) == len(part)
            states = [sources[one.source] for one in part]
            for one, state in zip(part, states, strict=True):
                targets[one.target] = state
        self.num_swapped_in += len(moved.moves_in)
        self.num_copies += len(moved.copies)

    def _digest(self, sequence: Sequence, length: int) -> bytes:
        digest = start(sequence.request)
        for position in range(length):
            digest = extend(digest, self._token(sequence, position))
        return digest
