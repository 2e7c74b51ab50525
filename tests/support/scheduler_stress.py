"""Stress test of the scheduler: random requests of every kind, each of which must get its isolated output."""

from __future__ import annotations

import copyreg
import io
import pickle
import random
from collections import Counter
from dataclasses import replace

from paged_backend.api.block_layout import FULL, BlockLayout, EdgeKind, LayerKind, StateKind, WindowKind
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Adapter, GenerateRequest, TokenDelta, max_blocks_needed
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import Fingerprint, requested_outputs
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.content import Contents
from paged_backend.kv.pages import NULL, PINNED
from paged_backend.scheduling.budgets import MaskBudget
from paged_backend.scheduling.plan import Costs, Plan, StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import PromptLookup
from tests.support.costly_guides import Clock, CostlyGuide
from tests.support.shadow import (
    FirstOfStride,
    ShadowStore,
    expected_beams,
    expected_fingerprints,
    expected_scores,
    expected_tokens,
    is_seen,
)

CONDITIONS = {  # each run takes one value of each
    "blocks": range(3, 25),
    "size": (1, 2, 4),
    "seqs": range(1, 7),
    "extra": range(21),
    "caching": (False, True, True),
    "vocab": (2, 3, 5),
    "host": (0, 0, 1, 5, 30),
    "disk": (False, True),
    "swap": (False, True),
    "pinned": (0, 0, 4, 100),
    "overlap": (False, True),
    "draft_tokens": (0, 0, 1, 4),
    "loras": (0, 0, 1, 2),
    "fair": (False, False, False, True),
    "kinds": ((FULL,),),
    "stages": (1,),
    "scores": ("", "", "computed", "kept", "kept"),
    "guides": (False, False, False, True),
}
PIPELINED = CONDITIONS | {"overlap": (False,), "stages": (2, 3, 4)}
DROPPING = CONDITIONS | {  # the same with kinds of layers that do not keep all blocks
    "blocks": range(12, 60),
    "host": (0, 0, 5, 20, 80),
    "pinned": (0, 0, 12, 100),
    "kinds": [
        kinds
        for window in (1, 2, 3, 5, 9)
        for kinds in (
            (WindowKind(1, window),),
            (FULL, WindowKind(1, window)),
            (FULL, WindowKind(3, window)),
            (FULL, WindowKind(1, window), WindowKind(2, 4)),
        )
    ]
    + [(FULL, EdgeKind(pages)) for pages in (1, 2, 3)]
    + [(FULL, WindowKind(1, 5), EdgeKind(2)), (WindowKind(1, 5), EdgeKind(2))]
    + [(FirstOfStride(stride=8),), (WindowKind(1, 3), FULL, FirstOfStride(2, stride=8))],
}
RECURRENT = CONDITIONS | {  # the same with recurrent layers
    "blocks": range(4, 60),
    "host": (0, 0, 5, 20, 80),
    "pinned": (0, 0, 12, 100),
    "draft_tokens": (0, 0, 1, 4),
    "kinds": [
        kinds
        for pages in (1, 2, 5)
        for kinds in (
            (FULL, StateKind(pages)),
            (FULL, StateKind(pages)),
            (LayerKind(0), StateKind(pages)),
            (WindowKind(1, 3), StateKind(pages)),
            (FULL, WindowKind(2, 5), StateKind(pages)),
            (FULL, EdgeKind(2), StateKind(pages)),
        )
    ],
}
MASK_LIMIT, MASK_COSTS = 10, (0, 0.1, 4, 50)  # seconds
ADAPTERS = [Adapter(name, name.encode(), 1, {}) for name in "xyz"]


def random_conditions(seed: int, conditions=CONDITIONS) -> dict:
    """Return the conditions of the run with this seed."""
    rnd = random.Random(seed)
    return {"seed": seed} | {name: rnd.choice(values) for name, values in conditions.items()}


def scheduler(
    num_blocks=32,
    block_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    caching=True,
    host=0,
    costs: Costs | None = None,
    session_pages=0,
    preemption="auto",
    draft_tokens=0,
    loras=0,
    fair=False,
    kinds=(FULL,),
    stages=1,
    keeps_scores=False,
    mask_budget: MaskBudget | None = None,
) -> Scheduler:
    layout = BlockLayout(block_size, kinds, max_pending=2 * max_num_batched_tokens)
    blocks = BlockManager(num_blocks, layout, caching=caching, keeps_scores=keeps_scores, num_host_pages=host)
    return Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        costs=costs,
        session_pages=session_pages,
        preemption=preemption,
        proposer=PromptLookup(shortest=1, longest=3),
        max_draft_tokens=draft_tokens,
        max_loras=loras,
        fair_tenants=fair,
        mask_budget=mask_budget,
        stages=stages,
    )


def request(key, prompt, max_tokens=4, stop_ids=frozenset(), seed=0, session=None, adapter=None, **sampling):
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    outputs = requested_outputs((), params)
    return GenerateRequest(
        key,
        tuple(prompt),
        params,
        seed,
        frozenset(stop_ids),
        session=session,
        token_outputs=outputs,
        adapter=adapter,
    )


def rivals():
    """Return two requests that fit the pool together only at first."""
    return request(0, range(50, 62), max_tokens=20), request(1, range(10, 19), max_tokens=20, n=2, seed=3)


def run_stress(seen: Counter[str] | None = None, **conditions) -> None:
    """Run the stress test, and count in `seen` what happened."""
    StressTest(Counter() if seen is None else seen, **conditions).run()


class StressTest:
    """Prompts of two tokens and two salts, so that many prefixes are equal, with forks, aborts and exhausted pools.
    overlap: plan and run a step before the one before is committed. stages: of a pipeline. scores: whether requests
    have prompt log probabilities and digests, and whether the former are kept with cached blocks. guides: whether
    requests have guides, with masks of any cost."""

    def __init__(self, seen, *, seed, blocks, size, seqs, extra, caching, vocab, host, disk, swap, pinned, overlap,
                 draft_tokens, loras, fair, kinds, stages, scores, guides):  # fmt: skip
        self.seen, self.rnd, self.vocab, self.size, self.num_blocks = seen, random.Random(seed), vocab, size, blocks
        self.disk, self.pinned, self.loras = disk and host, pinned, loras
        self.guides, self.masks = guides, Clock()
        self.mask_budget = MaskBudget(MASK_LIMIT, self.masks)
        self.sched = scheduler(blocks, size, seqs, seqs + extra, caching, host, session_pages=pinned,
                               preemption="swap" if swap else "recompute", draft_tokens=draft_tokens, loras=loras,
                               fair=fair, kinds=kinds, stages=stages, keeps_scores=scores == "kept",
                               mask_budget=self.mask_budget)  # fmt: skip
        self.scores = scores
        self.rows_scored: Counter[int] = Counter()  # computed positions by key
        self.prompts_scored: set[int] = set()  # keys of open requests whose prompt was returned
        self.fingerprints: dict[tuple[int, int], list[Fingerprint]] = {}  # of open samples
        self.steps_ahead = stages - 1 if stages > 1 else int(overlap)
        self.store = ShadowStore(self.sched, vocab)
        self.requests: dict[int, GenerateRequest] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}  # of open samples
        self.past: list[list[int]] = []  # earlier prompts
        self.gone: list[tuple[int, int]] = []
        self.left = 25
        self.flights: list[tuple[Plan, StepResult | None]] = []

    def run(self, steps=5000) -> None:
        for _ in range(steps):
            while self.left and self.rnd.random() < 0.4:
                self.arrive()
            self.disturb()
            if not self.step():
                break
        assert not self.left
        self.drain()

    def did(self, name: str) -> None:
        self.seen[name] += 1
        self.sched.check()

    def arrive(self) -> None:
        self.left -= 1
        prompt, n = self.prompt(), self.rnd.randint(1, min(3, self.sched.max_num_seqs))
        longest = max(0, self.num_blocks * self.size - len(prompt) + 1)
        while longest and max_blocks_needed(len(prompt), longest, n, self.sched.blocks.layout) > self.num_blocks:
            longest -= 1
        if not longest:
            return
        one = request(25 - self.left, prompt, **self.options(n, longest))
        if self.guides and one.sampling.beam_width == 1 and one.sampling.max_tokens:
            costs = [self.rnd.choice(MASK_COSTS) for _ in range(n)]
            one = replace(one, guides=tuple(CostlyGuide(self.masks, cost) for cost in costs))
        self.requests[one.key] = one
        self.outputs |= {(one.key, index): [] for index in range(one.sampling.n)}
        if self.disk:
            self.seen["blocks from disk"] += self.store.fetch(one)
        self.sched.add(one)
        self.did("add")

    def prompt(self) -> list[int]:
        """Return a prompt. Half of them share a prefix with an earlier one."""
        rnd, most = self.rnd, self.num_blocks * self.size
        prompt = [rnd.randrange(2) for _ in range(rnd.randint(1, rnd.choice([most, 1 + most // 3])))]
        if self.past and rnd.random() < 0.5:
            known = rnd.choice(self.past)[: len(prompt) - 1]
            prompt[: len(known)] = known
        self.past.append(prompt)
        return prompt

    def options(self, n: int, longest: int) -> dict:
        rnd = self.rnd
        choice = {
            "n": n,
            "max_tokens": rnd.randint(1, rnd.choice([longest, min(longest, 6)])),
            "stop_ids": {self.vocab - 1} if rnd.random() < 0.3 else set(),
            "seed": rnd.randrange(100),
            "cache_salt": rnd.choice(["", "tenant"]),
            "priority": rnd.choice([0, 0, 0, -1, 5]),
        }
        if n > 1 and rnd.random() < 0.5:
            choice |= {"beam_width": n, "n": rnd.randint(1, n), "early_stopping": rnd.choice([True, False])}
        if n == 1 and self.pinned:
            choice["session"] = rnd.choice([None, "a", "b"])
        if self.loras:
            choice["adapter"] = rnd.choice([None, *ADAPTERS])
        if self.scores:
            choice |= {
                "prompt_logprobs": rnd.choice([None, 0, 0, 0, 0, 1, 2]),
                "logits_digest": rnd.random() < 0.3,
            }
            if n == 1 and choice["prompt_logprobs"] is not None and rnd.random() < 0.2:
                choice["max_tokens"] = 0
        return choice

    def disturb(self) -> None:
        rnd = self.rnd
        if self.requests and rnd.random() < 0.05:
            self.abort(rnd.choice(sorted(self.requests)))
        if self.outputs and rnd.random() < 0.05:
            self.end(rnd.choice(sorted(self.outputs)))
        if rnd.random() < 0.02:
            self.abort_unknown()
        if self.pinned and rnd.random() < 0.02:
            self.sched.pins.drop(rnd.choice("ab"))
            self.did("end of a session")
        if rnd.random() < 0.02:
            empty(self.sched.blocks)
            self.did("reset")
        if self.disk and not self.flights and rnd.random() < 0.3:
            self.seen["blocks to disk"] += self.store.spill(most=rnd.randint(1, 4))
            self.did("spill")

    def abort(self, key: int) -> None:
        flying = {chunk.sequence.key for plan, _ in self.flights for chunk in plan.chunks}
        runs = any(group.key == key for group in self.sched.running)
        assert self.sched.abort(key)
        self.did("abort while running" if runs else "abort while waiting")
        self.seen["abort in flight"] += key in flying
        self.forget(key)

    def end(self, owner: tuple[int, int]) -> None:
        assert self.sched.end(*owner)
        self.did("end of a sample")
        del self.outputs[owner]
        self.gone.append(owner)
        if not any(key == owner[0] for key, _ in self.outputs):
            del self.requests[owner[0]]

    def abort_unknown(self) -> None:
        """Ending a request that has ended, or never existed, changes nothing."""
        key, index = self.rnd.choice([*self.gone, (99, 0)])
        before = snapshot(self.sched.blocks)
        if key not in self.requests:
            assert not self.sched.abort(key)
            assert not self.sched.end(key, index)
        assert snapshot(self.sched.blocks) == before
        self.did("abort of unknown request")

    def step(self) -> bool:
        """Run one step. Return False if nothing is left to do."""
        before, waits = self.masks.now, self.waits_for_masks()
        plan = self.sched.schedule()
        self.did("step")
        assert self.masks.now - before <= 2 * (MASK_LIMIT + max(MASK_COSTS))
        self.seen["masks left out"] += self.waits_for_masks()
        if plan is None:
            if not waits:
                self.nothing_changes()
            if not (self.flights or waits):
                assert not self.sched.has_work
                return self.left > 0
        fails = self.rnd.choice(["at once", "later"]) if plan and self.rnd.random() < 0.02 else None
        if plan is not None:
            assert plan.num_tokens <= self.sched.max_num_batched_tokens
            self.launch(plan, fails)
        if plan is None:
            kept = max(0, len(self.flights) - 1)
        else:
            kept = 0 if fails == "at once" or self.sched.needs_results else self.steps_ahead
        while len(self.flights) > kept:
            self.settle()
        self.seen["several steps in flight"] += len(self.flights) > 1
        if not self.flights:
            self.count_blocks()
        return True

    def waits_for_masks(self) -> bool:
        """Return whether a mask is to be computed that a sequence needs for its next token."""
        groups = (*self.sched.running, *self.sched.waiting)
        return any(one.needs_mask for group in groups for one in group.sequences)

    def nothing_changes(self) -> None:
        """Assert that a `schedule` without a plan leaves the pool as it is, byte for byte."""
        before = snapshot(self.sched.blocks)
        assert self.sched.schedule() is None
        assert snapshot(self.sched.blocks) == before
        self.seen["no request fits"] += self.sched.has_work

    def launch(self, plan: Plan, fails: str | None) -> None:
        for sequence in (one for chunk in plan.chunks for one in chunk.sampled_sequences if one.request.guides):
            assert sequence.request.guides[sequence.index].tokens == sequence.output[:-1], "without its mask"
        self.rows_scored.update({chunk.sequence.key: len(chunk.scored) for chunk in plan.chunks if chunk.scored})
        result = None if fails == "at once" else self.store.run(plan)
        if result and result.tokens and self.rnd.random() < 0.01:
            result = self.fail_row(plan, result)
        self.flights.append((plan, None if fails else result))

    def count_blocks(self) -> None:
        """Assert that between steps tables are as long as their tokens need, and the pool holds nothing else."""
        sched, fits = self.sched, self.sched.blocks.layout.blocks_for
        held = [one for group in sched.running for one in group.sequences]
        assert all(fits(one.computed) <= one.num_blocks <= fits(len(one.tokens)) for one in held)
        only_pinned = sched.blocks.pool.map(sched.pins.counts).count(PINNED)
        if sched.blocks.layout.kinds != (FULL,):
            self.count_kinds(held)
            return
        assert (sched.blocks.num_used - only_pinned) * self.size - sched.empty_slots == tokens_held(sched)

    def count_kinds(self, held) -> None:
        """Assert that a sequence holds the blocks that the query after its last full block can see, and no others."""
        size = self.size
        for one in held:
            for kind, table in zip(self.sched.blocks.layout.kinds, one.tables, strict=True):
                if isinstance(kind, StateKind):
                    assert [block != NULL for block in table] == [at == len(table) - 1 for at in range(len(table))]
                    continue
                query = one.computed // size * size
                seen = {at // size for at in range(query) if is_seen(kind, at, query, size)}
                assert [block != NULL for block in table] == [
                    at in seen or at >= query // size for at in range(len(table))
                ]
                self.seen["blocks that are not kept"] += NULL in table

    def fail_row(self, plan: Plan, result: StepResult) -> StepResult:
        """Return the result with an error in place of one sampled token, as for logits that are not finite."""
        first, sequences = 0, []
        for chunk in plan.chunks:
            if chunk.sampled_sequences:
                sequences.append(first)
            first += len(chunk.sampled_sequences)
        error = RequestError(ErrorCode.INTERNAL, "not a number")
        return replace(result, errors={self.rnd.choice(sequences): error}) if sequences else result

    def settle(self) -> None:
        """Commit the oldest step, or fail it together with the step that was planned after it."""
        plan, result = self.flights.pop(0)
        if result is None:
            for failed in (plan, *(later for later, _ in self.flights)):
                for delta in self.sched.fail(failed, "out of order"):
                    self.forget(delta.key)
                self.seen["failed moves"] += bool(failed.transfers.moves_out or failed.transfers.moves_in)
                self.did("failed step")
            self.flights.clear()
            return
        for delta in self.sched.commit(plan, result):
            if delta.error:
                self.seen["failed row"] += 1
                self.forget(delta.key)
                continue
            if delta.prompt_values is not None:
                self.check_prompt(delta)
                continue
            owner = delta.key, delta.sample
            self.outputs[owner] += delta.token_ids
            self.fingerprints.setdefault(owner, []).extend(delta.values.get("fingerprints", ()))
            if delta.finish:
                self.check_output(owner)
        self.sched.check()

    def check_prompt(self, delta: TokenDelta) -> None:
        """Check the log probabilities of a prompt, which are returned once, before the first token."""
        one = self.requests[delta.key]
        assert delta.prompt_values == expected_scores(one, self.vocab)
        assert delta.key not in self.prompts_scored
        assert not any(self.outputs.get((delta.key, index)) for index in range(one.sampling.n))
        self.prompts_scored.add(delta.key)
        self.seen["scored prompt"] += 1
        from_cache = self.rows_scored[one.key] < len(delta.prompt_values["logprobs"])
        assert self.scores == "kept" or not from_cache
        self.seen["scores from the cache"] += from_cache

    def check_output(self, owner: tuple[int, int]) -> None:
        found, one = self.outputs.pop(owner), self.requests[owner[0]]
        fingerprints = self.fingerprints.pop(owner)
        if one.sampling.logits_digest:
            assert fingerprints == expected_fingerprints(one, found)
            self.seen["digest"] += 1
        if one.sampling.prompt_logprobs is not None and len(one.prompt_token_ids) > 1:
            assert one.key in self.prompts_scored
        if one.sampling.beam_width > 1:
            assert tuple(found) == expected_beams(one, self.vocab)[owner[1]]
            self.seen["beam output"] += 1
        else:
            assert found == expected_tokens(one, owner[1], self.vocab)
        self.seen["adapter output"] += one.adapter is not None
        self.seen["session output"] += one.session is not None
        self.gone.append(owner)
        if not any(key == owner[0] for key, _ in self.outputs):
            del self.requests[owner[0]]

    def forget(self, key: int) -> None:
        self.requests.pop(key, None)
        for owner in [owner for owner in self.outputs if owner[0] == key]:
            del self.outputs[owner]
            self.gone.append(owner)

    def drain(self) -> None:
        blocks, stats = self.sched.blocks, self.sched.stats
        assert blocks.num_used == stats.blocks_pinned <= self.pinned
        for name in ("recomputed", "swapped", "cached_tokens", "host_tokens", "evictions", "copies", "moves_out",
                     "moves_in", "draft_tokens", "accepted_tokens", "blocks_pinned"):  # fmt: skip
            self.seen[name] += getattr(stats, name)
        self.seen["state copies"] += self.store.num_state_copies
        self.seen["states moved in"] += self.store.num_states_moved_in
        if self.rnd.random() < 0.5:
            self.sched.clear_cache()
            self.sched.check()
            assert blocks.pool.num_used == blocks.pool.num_cached == 0
            assert blocks.host is None or blocks.host.num_used == 0
            return
        while self.sched.pins.drop_oldest():
            self.sched.check()
        assert blocks.num_used == 0
        empty(blocks)
        assert blocks.pool.num_used == blocks.pool.num_cached == 0
        blocks.ledger.finish(blocks.ledger.take())  # moves for a next step
        assert blocks.host is None or blocks.host.num_used == 0


class _Pickler(pickle.Pickler):
    """Pickles without the weakly referenced entries."""

    dispatch_table = copyreg.dispatch_table | {Contents: lambda _: (Contents, ())}


def snapshot(blocks: BlockManager) -> bytes:
    """Return the whole state of a block manager as bytes, to assert that a refused call changed nothing."""
    file = io.BytesIO()
    _Pickler(file).dump(blocks)
    return file.getvalue()


def empty(blocks: BlockManager) -> None:
    """Evict every cached block."""
    sizes = [kind.pages for kind in blocks.layout.kinds]
    kind = sizes.index(min(filter(None, sizes)))
    table = blocks.pool.allocate(blocks.pool.num_available // sizes[kind], kind)
    assert table is not None
    blocks.pool.free_table(table)


def tokens_held(sched: Scheduler) -> int:
    """Return how many slots of the pool hold a token of a sequence, counted one by one."""
    size = sched.blocks.block_size
    return len(
        {
            (one.tables[0][position // size], position % size)
            for group in sched.running
            for one in group.sequences
            for position in range(one.computed)
        }
    )
