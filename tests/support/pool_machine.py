"""A state machine that applies every operation of a block manager in random order, and compares it with a simple model.

The choices are read from bytes, which come from a seed or from hypothesis.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random

from paged_backend.api.request import Origin, TokenLogprob
from paged_backend.scheduling import content as keys
from paged_backend.scheduling.block_manager import Copy
from paged_backend.scheduling.block_scores import BlockScores
from paged_backend.scheduling.content import Chain
from paged_backend.scheduling.host_offload import BlockTransfer
from paged_backend.scheduling.prefix_cache import CacheHit
from tests.support.pool_state import (
    MAX_REQUESTS,
    PART,
    SALTS,
    Choices,
    Flight,
    Known,
    Request,
    State,
    described,
    snapshot,
)


class Machine(State):
    """The rules. A rule that cannot be applied returns False."""

    def step(self, choices: Choices) -> None:
        """Apply the first chosen rule that can be applied. A zero byte ends the choice."""
        self.choices = choices
        while number := choices.next_byte():
            name = RULES[number % len(RULES)]
            if getattr(self, name)() is not False:
                self.seen[name] += 1
                self.steps += 1
                self.check()
                return

    # --- requests --------------------------------------------------------------------------------------------------

    def admit(self) -> bool | None:
        if len(self.requests) == MAX_REQUESTS:
            return False
        below = self.choices.below
        start = self.past[below(len(self.past))]
        tokens = start[: below(len(start) + 1)] if below(4) else []
        bits = below(256) | below(256) << 8
        tokens = tokens + [bits >> i & 1 for i in range(1 + below(2 + 3 * self.size))]
        self.past = [*self.past[-15:], tokens]
        salt = below(2)
        request = Request(salt, tokens, [], Chain(Origin(SALTS[salt])))
        self._digest(request)
        self._enter(request)
        return None

    def resume(self) -> bool | None:
        waiting = [one for one in self.requests if not one.table and not self._is_pending(one)]
        if not waiting:
            return False
        request = waiting[self.choices.below(len(waiting))]
        if request.swapped:
            others = [one for one in waiting if one.swapped and one is not request]
            return self._swap_in([request, *others[: self.choices.below(2)]])
        self._enter(request)
        return None

    def _enter(self, request: Request) -> None:
        """Adopt the cache hit of a request and plan its first chunk, if there is room."""
        total, device = len(request.tokens), self.device
        hit = self.blocks.match(request.chain, request.tokens)
        self._check_hit(request, hit)
        here = hit.device_blocks
        needed = self._blocks_for(total) - len(here) + sum(block in device.cached for block in here)
        if needed > device.num_available:
            self.seen["admission refused"] += 1
            if self._blocks_for(total) > device.num_available:
                self._refused(lambda: self.blocks.grow([], total), "grow")
            return
        if hit.partial:
            taken = not hit.partial.on_host and hit.partial.block in device.cached
            if needed + taken > device.num_available or self.choices.below(8) == 0:
                hit = CacheHit(hit.blocks)
        self._adopt(request, hit)
        if request not in self.requests:
            self.requests.append(request)
        goal = request.computed + 1 + self.choices.below(total - request.computed)
        self._grow(request, goal)
        self._plan(request, goal)

    def _adopt(self, request: Request, hit: CacheHit) -> None:
        for block, on_host in hit.blocks:
            self.host.lock(block) if on_host else self.device.hold(block)
        if hit.partial:
            (self.host if hit.partial.on_host else self.device).lock(hit.partial.block)
        table, moves, copies = self.blocks.adopt(hit)
        self._collect()
        left, arrivals = deque(moves), []
        for (block, on_host), mine in zip(hit.blocks, table, strict=False):
            if on_host:
                arrivals.append(self._arrival(left.popleft(), block, mine, known=True))
            else:
                assert mine == block
        if hit.partial:
            block, on_host = hit.partial
            if on_host:
                arrivals.append(self._arrival(left.popleft(), block, table[-1], known=False))
            else:
                assert copies == [Copy(block, table[-1])]
                self._take(table[-1])
                self.copies.append((request, copies[0]))
            self.seen["partial hit"] += 1
        assert not left and len(table) == len(hit.blocks) + bool(hit.partial)
        if arrivals:
            self.moves_in.append(([request], arrivals))
            self.seen["hit on the host"] += 1
        request.table = table
        request.computed = request.committed = len(hit.blocks) * self.size + hit.partial_tokens
        self.seen["hit of full blocks"] += bool(hit.blocks)

    def append(self) -> bool | None:
        """Plan the next chunk of a request, with a copy-on-write if its block is shared."""
        request = self._pick(lambda one: one.table and not one.wrong and not self._is_pending(one))
        if request is None:
            return False
        below = self.choices.below
        if request.computed == len(request.tokens):
            bits = below(256)
            request.tokens += [bits >> i & 1 for i in range(1 + below(4))]
            self._digest(request)
        table, index = request.table, request.computed // self.size
        goal = request.computed + 1 + below(len(request.tokens) - request.computed)
        wrong = below(6) if goal == len(request.tokens) and not self.flights and below(4) == 0 else 0
        shared = index < len(table) and self.device.is_shared(table[index])
        assert index >= len(table) or shared == self.blocks.pool.is_shared(table[index])
        more = max(0, self._blocks_for(goal + wrong) - len(table))
        if shared + more > self.device.num_available:
            if more > self.device.num_available:
                self._refused(lambda: self.blocks.grow(table, goal + wrong), "grow")
            elif not self.device.num_available:
                self._refused(lambda: self.blocks.make_writable(table, index), "make_writable")
            return None
        if shared:
            source = table[index]
            copy = self.blocks.make_writable(table, index)
            self._collect()
            assert copy == Copy(source, table[index])
            self._take(table[index])
            self.device.moving[source] += 1
            self.copies.append((request, copy))
            self.seen["copy-on-write"] += 1
        self._grow(request, goal + wrong)
        self._plan(request, goal, wrong)
        return None

    def fork(self) -> bool | None:
        parent = self._pick(
            lambda one: (
                one.table
                and not one.wrong
                and not self._is_pending(one)
                and len(one.table) == self._blocks_for(one.computed)
            )
        )
        if parent is None or len(self.requests) == MAX_REQUESTS:
            return False
        full = parent.computed // self.size
        child = Request(parent.salt, parent.tokens[: parent.computed], parent.digests[: parent.computed],
                        parent.chain.head(full), parent.contents[:full], self.blocks.fork(parent.table),
                        computed=parent.computed, committed=parent.committed)  # fmt: skip
        assert child.table == parent.table and child.table is not parent.table
        for block in child.table:
            self.device.hold(block)
        for flight in self.flights:
            if parent in flight.ends:
                flight.ends[child] = flight.ends[parent]
        self.requests.append(child)
        return None

    def end(self) -> bool | None:
        """End a request: waiting, swapped out, running, or with a step in flight."""
        request = self._pick(lambda one: True)
        if request is None:
            return False
        if request.swapped:
            self.seen["end while swapped out"] += 1
        elif any(request in flight.ends for flight in self.flights):
            self.seen["end in flight"] += 1
        elif self._is_pending(request):
            self.seen["end while planned"] += 1
        self._leave(request)
        return None

    def preempt(self) -> bool | None:
        request = self._pick(lambda one: one.table)
        if self.flights or request is None:
            return False
        self._restart(request)
        return None

    def swap_out(self) -> bool | None:
        able = [one for one in self.requests if one.table and not one.wrong and not self._is_pending(one)]
        if self.flights or not able or self.blocks.host is None:
            return False
        at = self.choices.below(len(able))
        chosen, host = able[at : at + 1 + self.choices.below(2)], self.host
        tables = [one.table for one in chosen]
        if len({block for table in tables for block in table}) > host.num_available:
            self._refused(lambda: self.blocks.offload.swap_out(tables), "swap_out")
            return None
        before = [list(table) for table in tables]
        swapped = self.blocks.offload.swap_out(tables)
        self._collect()
        moved: dict[int, int] = {}
        for block in (block for table in before for block in table):
            if block in moved:
                host.hold(moved[block])
                self.seen["shared block swapped out once"] += 1
            else:
                known = self.device.known.get(block)
                moved[block] = self._out(block, known and (known, self.device.digests[block]))
        assert swapped == [[moved[block] for block in table] for table in before]
        for one, table, there in zip(chosen, before, swapped, strict=True):
            assert not one.table
            one.swapped = there
            self._drop_all(self.device, table)
        return None

    def _swap_in(self, chosen: list[Request]) -> None:
        distinct = list(dict.fromkeys(block for one in chosen for block in one.swapped))
        if len(distinct) > self.device.num_available:
            self.seen["swap-in refused"] += 1
            return
        here: dict[int, int] = {}
        for block in distinct:
            known = self.host.known.get(block)
            found = self.device.find(known) if known else None
            if found is not None:
                self.device.hold(found)
                here[block] = found
        before = [list(one.swapped) for one in chosen]
        tables, moves = self.blocks.offload.swap_in([one.swapped for one in chosen])
        self._collect()
        left, arrivals = deque(moves), []
        for block in distinct:
            if block not in here:
                self.host.lock(block)
                arrivals.append(self._arrival(left[0], block, left.popleft().target, known=True))
                here[block] = arrivals[-1][0].target
        assert not left and tables == [[here[block] for block in table] for table in before]
        for block, count in Counter(block for table in before for block in table).items():
            for _ in range(count - 1):
                self.device.hold(here[block])
        for one, table, there in zip(chosen, tables, before, strict=True):
            assert not one.swapped
            one.table = table
            self._drop_all(self.host, there)
        if arrivals:
            self.moves_in.append((list(chosen), arrivals))
        self.seen["swapped in"] += 1

    def invalidate(self) -> bool | None:
        """Invalidate the blocks of a request, and end it."""
        request = self._pick(lambda one: one.table)
        if request is None:
            return False
        self.blocks.invalidate(request.table)
        for block in request.table:
            if block in self.device.known:
                self.fresh.pop(block, None)
                content, _ = self.device.forget(block)
                there = self.host.find(content)
                if there is not None:
                    self.host.forget(there)
                    self.seen["invalidated on the host"] += 1
                    if there in self.host.cached:
                        del self.host.cached[there]
                        self.host.free.add(there)
        self._leave(request)
        return None

    def score(self) -> bool | None:
        """Store the scores of a full block, and look up those of all blocks of its request."""
        request = self._pick(lambda one: one.committed >= self.size)
        if request is None:
            return False
        index, num_top, digest = (self.choices.below(count) for count in (request.committed // self.size, 3, 2))
        content = self._content(request, index)
        token = abs(hash(content.key)) % 2**31
        row = tuple(TokenLogprob(token + place & 2**31 - 1, -0.5 * place, 1 + place) for place in range(1 + num_top))
        scores = BlockScores(num_top, [row], [bytes(16)] * digest)
        self.blocks.cache.add_scores(request.chain, request.tokens, index, scores)
        block = self.device.find(content)
        if block is not None:
            self.device.score(block, num_top, bool(digest), token)
            self.seen["scored block"] += 1
        for number in range(len(request.tokens) // self.size):
            there = self.device.find(self._content(request, number))
            found = self.blocks.cache.find_scores(request.chain, request.tokens, number)
            assert described(found) == (None if there is None else self.device.scores.get(there))
            self.seen["scores found"] += found is not None
        return None

    # --- steps -----------------------------------------------------------------------------------------------------

    def launch(self) -> bool | None:
        if len(self.flights) == 2 or not (self.moves_out or self.moves_in or self.copies or self.writes):
            return False
        moves_in = [arrival for _, arrivals in self.moves_in for arrival in arrivals]
        copies = [copy for _, copy in self.copies]
        in_moves = [move for move, _ in moves_in]
        targets = {move.target for move in in_moves} | {copy.target for copy in copies}
        assert len(targets) == len(moves_in) + len(copies) and not targets & {copy.source for copy in copies}
        assert len({move.target for move in self.moves_out}) == len(self.moves_out)
        for moves, source, target in (
            (self.moves_out, self.slots, self.host_slots),
            (in_moves, self.host_slots, self.slots),
            (copies, self.slots, self.slots),
        ):
            for move in moves:
                target[move.target] = list(source[move.source])
        for request, (start, end) in self.writes.items():
            self._read(request, start)
            for position in range(start, end + request.wrong):
                block = request.table[position // self.size]
                assert block not in self.device.known and not self.device.is_shared(block)
                targets.add(block)
                self.slots[block][position % self.size] = request.digests[position] if position < end else -1
        for request, (
            _,
            end,
        ) in self.writes.items():  # after all writes
            self._read(request, end)
        ends = {request: end for request, (_, end) in self.writes.items()}
        for group, _ in self.moves_in:
            ends |= {one: one.committed for one in group if one not in ends}
        ends |= {one: one.committed for one, _ in self.copies if one not in ends}
        self.flights.append(Flight(self.moves_out, moves_in, copies, ends, targets))
        self.moves_out, self.moves_in, self.copies, self.writes = [], [], [], {}
        self.seen["two steps in flight"] += len(self.flights) == 2
        return None

    def commit(self) -> bool | None:
        """Commit the oldest step."""
        if not self.flights:
            return False
        flight = self.flights.popleft()
        self._retire(flight, done=True)
        for request, end in flight.ends.items():
            if request.ended:
                continue
            first, request.committed = request.committed // self.size, end
            for index in range(first, end // self.size):
                self._seal(request, index)
            if request.wrong and request.computed == end + request.wrong:
                request.computed, request.wrong = end, 0
                while len(request.table) > self._blocks_for(end):
                    block = request.table.pop()
                    self.blocks.pool.free(block)
                    self.device.drop(block)
                    self.seen["blocks of rejected drafts"] += 1
        return None

    def fail(self) -> bool | None:
        """Fail all steps in flight. The requests in them, and in the step being planned, end."""
        if not self.flights:
            return False
        ended = (
            {one for group, _ in self.moves_in for one in group} | {one for one, _ in self.copies} | set(self.writes)
        )
        lost: set[int] = set()
        for flight in self.flights:
            self._retire(flight, done=False)
            lost |= {move.target for move in flight.moves_out}
            ended |= flight.ends.keys()
            for block in flight.targets:
                self.slots[block] = [-2] * self.size
            self.seen["failed moves"] += bool(flight.moves_out or flight.moves_in)
        for block in lost:
            self.host_slots[block] = [-2] * self.size
        self.flights.clear()
        for request in list(self.requests):
            if request in ended:
                self._leave(request)
            elif lost.intersection(request.swapped):
                self._restart(request)
        return None

    def _retire(self, flight: Flight, *, done: bool) -> None:
        self.blocks.offload.finish_moves_out(flight.moves_out, done=done)
        for move in flight.moves_out:
            if not done and move.target in self.host.known:
                self.host.forget(move.target)
            self.host.unlock(move.target)
        self._finish_ins(flight.moves_in, done=done)
        self._finish(flight.copies)

    def _finish_ins(self, moves_in: list[tuple[BlockTransfer, Known]], *, done: bool) -> None:
        self.blocks.offload.finish_moves_in([move for move, _ in moves_in], done=done)
        for move, known in moves_in:
            if done and known and self.device.caching:
                self.device.know(move.target, *known)
            self.device.unlock(move.target)
            self.host.unlock(move.source)

    def _finish(self, copies: list[Copy]) -> None:
        self.blocks.finish_copies(copies)
        for copy in copies:
            self.device.unlock(copy.source)

    def _seal(self, request: Request, index: int) -> None:
        block = request.table[index]
        self.blocks.cache_block(block, request.chain, request.tokens, index)
        if not self.device.caching or block in self.device.known:
            return
        content = self._content(request, index)
        if self.device.know(block, content, request.digests[index * self.size : (index + 1) * self.size]):
            self.fresh[block] = None
        else:
            self.seen["duplicate content"] += 1

    # --- the pool --------------------------------------------------------------------------------------------------

    def hog(self) -> None:
        """Allocate a random number of blocks, evicting cached ones."""
        self._hog(self.choices.below(self.blocks.num_blocks + 1))

    def _hog(self, count: int) -> None:
        if count > self.device.num_available:
            self._refused(lambda: self.blocks.allocate(count), "allocate")
            return
        blocks = self.blocks.allocate(count)
        self._collect()
        assert blocks is not None and len(blocks) == count
        for block in blocks:
            self._take(block)
        self.hogs.append(blocks)

    def release_hog(self) -> bool | None:
        if not self.hogs:
            return False
        held = self.hogs.pop()
        blocks = list(held)
        self.blocks.free(held)
        self._drop_all(self.device, blocks)
        return None

    def reset(self) -> None:
        """Evict every cached block."""
        self._hog(self.blocks.num_available)
        self.release_hog()

    def double_free(self) -> None:
        """Free a block that is free, cached or unknown."""
        blocks = [-1, self.blocks.num_blocks, *list(self.device.free)[:2], *list(self.device.cached)[:2]]
        block = blocks[self.choices.below(len(blocks))]
        before = snapshot(self.blocks)
        rejection = ""
        try:
            self.blocks.free([block])
        except ValueError as error:
            rejection = str(error)
        assert f"block {block}:" in rejection
        assert snapshot(self.blocks) == before
        self.seen["double free of a cached block"] += block in self.device.cached

    def spill(self) -> bool | None:
        """Spill cached blocks to the disk, by way of the host, while the machine is idle."""
        if self.flights or self.moves_out or self.moves_in or self.copies or self.writes or self.blocks.host is None:
            return False
        most = 1 + self.choices.below(4)
        waiting = [(block, self.blocks.pool.index.entry(block)) for block in self.fresh]
        assert self.blocks.offload.has_unspilled == bool(waiting)
        moves_out = self.blocks.offload.spill(lambda entry: entry.key not in self.disk, most)
        self.new_outs.extend(moves_out)
        left = most
        for block, entry in waiting:
            assert entry is not None
            if not left:
                break
            content = self.device.known[block]
            if entry.key in self.disk:
                self.seen["key collision"] += self.disk[entry.key][:2] != entry.prefix
            elif self.host.find(content) is None:
                if not self.host.num_available:
                    break
                self.host.drop(self._out(block, (content, self.device.digests[block])))
                left -= 1
            del self.fresh[block]
        assert not self.new_outs
        for move in self.moves_out:
            self.host_slots[move.target] = list(self.slots[move.source])
            assert move.entry is not None
            held = *move.entry.prefix, self.device.known[move.source], self.host_slots[move.target]
            self.disk.setdefault(move.entry.key, held)
        self.blocks.offload.finish_moves_out(self.moves_out)
        for move in self.moves_out:
            self.host.unlock(move.target)
        self.seen["block spilled"] += bool(self.moves_out)
        self.moves_out = []
        return None

    def fetch(self) -> bool | None:
        """Load a block from the disk to the host."""
        if not self.disk:
            return False
        origin, tokens, content, digests = list(self.disk.values())[self.choices.below(len(self.disk))]
        assert self.blocks.host is not None
        offload, entry = (
            self.blocks.offload,
            self.blocks.cache.entry(Chain(origin), tokens, len(tokens) // self.size - 1),
        )
        if self.host.find(content) is not None or not self.host.num_available:
            self._refused(lambda: offload.add_host_block(entry), "add_host_block")
            return None
        block = offload.add_host_block(entry)
        assert block is not None
        self._take_on_host(block)
        self.host.know(block, content, digests)
        self.host.drop(block)
        self.host_slots[block] = list(digests)
        self.seen["block from disk"] += 1
        return None

    def _unplan(self, request: Request) -> None:
        """Remove a request from the step being planned. Requests that were swapped in together with it restart."""
        mine = [one for one in self.moves_in if request in one[0]]
        self.moves_in = [one for one in self.moves_in if request not in one[0]]
        copies = [copy for one, copy in self.copies if one is request]
        self.copies = [one for one in self.copies if one[0] is not request]
        self.writes.pop(request, None)
        self._finish(copies)
        for group, arrivals in mine:
            self._finish_ins(arrivals, done=False)
            for other in group:
                if other is not request:
                    self._restart(other)

    def _release(self, request: Request) -> None:
        self._unplan(request)
        for manager, pool, table in ((self.blocks.pool, self.device, request.table),
                                     (self.blocks.host, self.host, request.swapped)):  # fmt: skip
            if manager and table:
                before = list(table)
                assert manager.num_freed_by([table]) == sum(pool.holders[block] == 1 for block in table)
                manager.free_table(table)
                assert table == []
                self._drop_all(pool, before)

    def _restart(self, request: Request) -> None:
        self._release(request)
        request.computed = request.committed = request.wrong = 0
        self.seen["recomputed"] += 1

    def _leave(self, request: Request) -> None:
        self._release(request)
        request.ended = True
        self.requests.remove(request)

    def close(self) -> None:
        """End all requests; check that no block is used, and that evicting the cached blocks frees all."""
        if len(self.flights) < 2:
            self.launch()
        while self.flights:
            self.commit()
        while self.requests:
            self._leave(self.requests[0])
        if self.moves_out:
            self.launch()
            self.commit()
        while self.hogs:
            self.release_hog()
        self.check_all()
        assert self.blocks.num_used == 0 and not any(self.device.holders) and not any(self.host.holders)
        blocks = self.blocks.allocate(self.blocks.num_blocks)
        self._collect()
        assert blocks
        for block in blocks:
            self._take(block)
        self.hogs.append(blocks)
        self.release_hog()
        self.check()
        assert self.blocks.pool.num_free == self.blocks.num_blocks
        salted = [content.key for content in self.host.known.values()]
        kept = {(salt, tokens[:end]) for salt, tokens in salted for end in range(self.size, len(tokens) + 1, self.size)}
        assert len(self.blocks.cache.contents) == len(kept), "an entry is kept that precedes no cached block"


STATES = (  # to be met in any long run, in addition to the rules
    "block from disk", "block spilled", "partial hit", "hit of full blocks",
    "hit on the host", "admission refused", "shared block swapped out once", "two steps in flight",
    "allocate is refused", "same tokens under another salt", "swapped in", "blocks of rejected drafts", "copy-on-write",
    "double free of a cached block", "end in flight", "end while swapped out", "end while planned", "eviction",
    "eviction on the host", "eviction offloaded", "recomputed", "grow is refused",
    "add_host_block is refused", "key collision", "make_writable is refused", "failed moves",
    "swap-in refused", "swap_out is refused", "duplicate content",
    "invalidated on the host", "scored block", "scores found", "scores evicted",
)  # fmt: skip
RULES = (
    ["admit"] * 6 + ["append"] * 12 + ["launch"] * 9 + ["commit"] * 9 + ["end"] * 4 + ["fork", "resume"] * 3
    + ["preempt", "swap_out", "hog", "release_hog", "spill", "fetch", "fail"] * 2
    + ["reset", "double_free", "invalidate"] + ["score"] * 3
)  # fmt: skip


def play(parts: Sequence[bytes], seen: Counter[str]) -> int:
    """Run the machine: the first part of the bytes sets up the pool, each other part is a step. Return the number of
    steps that could be done, and count in `seen` what happened."""
    machine = Machine(Choices(parts[0]), seen)
    for part in parts[1:]:
        machine.step(Choices(part))
    machine.close()
    return machine.steps


@contextmanager
def truncated_keys(bits: int) -> Iterator[None]:
    """Make keys collide: only `bits` bits of a block's key, at most 8, differ, and all origins have the same key."""
    root, chain = keys.root_key, keys.chain_key
    keys.root_key = lambda origin: bytes(32)
    keys.chain_key = lambda parent, tokens: bytes([chain(parent, tokens)[0] >> 8 - bits]).rjust(32, b"\0")
    try:
        yield
    finally:
        keys.root_key, keys.chain_key = root, chain


def play_seeds(seeds: range, *, num_steps: int = 1000) -> tuple[int, Counter[str]]:
    """Run the machine for these seeds, every other one with colliding keys. Return the number of steps and what
    happened."""
    steps, seen = 0, Counter[str]()
    for seed in seeds:
        bits = (0, 4, 0, 8)[seed % 4]
        try:
            with truncated_keys(bits) if bits else nullcontext():
                content = Random(seed).randbytes(PART * (1 + num_steps))
                parts = [content[at : at + PART] for at in range(0, len(content), PART)]
                steps += play(parts, seen)
        except Exception as error:
            raise AssertionError(f"seed {seed}: play_seeds(range({seed}, {seed + 1})) fails") from error
    return steps, seen
