"""The state of the pool machine: a block manager, the model of it, the requests that use it, and the slots' contents.

    requests    tables of blocks, the tokens that are in them, and those that are being written
    pending     moves, copies and writes of the step that is being planned
    flights     steps on the device, at most two; they do what is asked for in order, and are retired in order

A slot holds a digest of all tokens up to its own. So a read of another request's slot, of a stale one or of one whose
move failed is detected.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paged_backend.api.request import Origin
from paged_backend.scheduling.block_manager import BlockManager, Copy
from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.block_scores import BlockScores
from paged_backend.scheduling.content import Chain, Contents
from paged_backend.scheduling.host_offload import BlockTransfer
from paged_backend.scheduling.prefix_cache import BlockLocation, CacheHit
from tests.support.pool_model import Content, PoolModel

FULL_CHECK_EVERY = 16  # steps; pool maps, counts and indexed blocks are compared after each step
BYTES_EVERY = 4  # refusals that compare the whole state; the others compare what `check` looks at
MAX_REQUESTS = 8
PART = 16  # bytes per step
SALTS = ("", "tenant")


class Choices:
    """Reads numbers from bytes; zeros once they are used up."""

    def __init__(self, content: bytes):
        self._left = iter(content)

    def next_byte(self) -> int:
        return next(self._left, 0)

    def below(self, count: int) -> int:
        return self.next_byte() % count


@dataclass(eq=False)
class Request:
    salt: int
    tokens: list[int]
    digests: list[int]  # expected contents of its slots
    chain: Chain
    contents: list[Content] = field(default_factory=list)  # contents of full blocks, as far as computed
    table: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    computed: int = 0  # number of planned tokens
    committed: int = 0  # number in committed steps
    wrong: int = 0  # number of planned draft tokens that will be rejected
    ended: bool = False


@dataclass
class Flight:
    moves_out: list[BlockTransfer]
    moves_in: list[tuple[BlockTransfer, Known]]
    copies: list[Copy]
    ends: dict[Request, int]  # tokens of each that are computed once the step is committed
    targets: set[int]  # blocks of the device that the step writes


Known = tuple[Content, list[int]] | None  # expected content and slots of a moved block
OnDisk = tuple[Origin, list[int], Content, list[int]]  # origin, prefix, content, slots


class _Pickler(pickle.Pickler):
    """Pickles without the weakly referenced entries."""

    dispatch_table = copyreg.dispatch_table | {Contents: lambda _: (Contents, ())}


def snapshot(blocks: BlockManager) -> bytes:
    """Return the whole state of a block manager as bytes, to assert that a refused call changed nothing."""
    file = io.BytesIO()
    _Pickler(file).dump(blocks)
    return file.getvalue()


def described(scores: BlockScores | None) -> tuple[int, bool, int] | None:
    """Return what `PoolModel.scores` has of a block."""
    return scores and (scores.num_top, bool(scores.fingerprints), scores.logprobs(0)[0][0].token)


class State:
    """A block manager, the model of it, and its users."""

    def __init__(self, choices: Choices, seen: Counter[str]):
        below = choices.below
        size, count, host = 1 + below(4), 8 + below(25), (0, 3, 8, 32)[below(4)]
        self.choices, self.seen, self.size = choices, seen, size
        caching = below(8) > 0
        behind = BlockPool(host, caching=caching) if host else None
        self.blocks = BlockManager(count, size, caching=caching, host=behind)
        self.device = PoolModel(count, caching=caching)
        self.host = PoolModel(host, caching=caching)
        self.slots = [[0] * size for _ in range(count)]
        self.host_slots = [[0] * size for _ in range(host)]
        self.disk: dict[bytes, OnDisk] = {}
        self.requests: list[Request] = []
        self.hogs: list[list[int]] = []
        self.past: list[list[int]] = [[0]]  # earlier prompts
        self.fresh: dict[int, None] = {}
        self.moves_out: list[BlockTransfer] = []  # this and the next three: for the step being planned
        self.moves_in: list[tuple[list[Request], list[tuple[BlockTransfer, Known]]]] = []
        self.copies: list[tuple[Request, Copy]] = []
        self.writes: dict[Request, tuple[int, int]] = {}
        self.flights: deque[Flight] = deque()
        self.new_outs: deque[BlockTransfer] = deque()  # moves that the model has not followed yet
        self.steps = 0

    # --- checks after each step ------------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.new_outs, "a move that the model does not expect"
        for pool, model in ((self.blocks.pool, self.device), (self.blocks.host, self.host)):
            if pool:
                assert pool.states() == model.states
                assert pool.index.blocks == model.known.keys()
                assert (pool.num_free, pool.num_cached) == (len(model.free), len(model.cached))
                assert {block: described(one) for block, one in pool.index.scores.items()} == model.scores
        if self.steps % FULL_CHECK_EVERY == 0:
            self.check_all()

    def check_all(self) -> None:
        tables, swapped = [one.table for one in self.requests], [one.swapped for one in self.requests]
        self.blocks.check([*tables, *self.hogs], swapped)
        coming = {move.target for move in self.moves_out}
        for pool, slots, unknown in ((self.device, self.slots, set()), (self.host, self.host_slots, coming)):
            for block in pool.known.keys() - unknown:
                assert slots[block] == pool.digests[block], f"block {block} does not hold its indexed content"
        for request in self.requests:
            if request.table and not self._is_pending(request):
                self._read(request, request.computed - request.wrong)

    def _read(self, request: Request, length: int) -> None:
        """Compare a request's first `length` slots with what they must hold, through its block table."""
        size, slots = self.size, self.slots
        for index, block in enumerate(request.table[: self._blocks_for(length)]):
            here = min(size, length - index * size)
            assert slots[block][:here] == request.digests[index * size : index * size + here]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _pick(self, able: Callable[[Request], object]) -> Request | None:
        found = [one for one in self.requests if able(one)]
        return found[self.choices.below(len(found))] if found else None

    def _is_pending(self, request: Request) -> bool:
        return (
            request in self.writes
            or any(request in group for group, _ in self.moves_in)
            or any(request is one for one, _ in self.copies)
        )

    def _digest(self, request: Request) -> None:
        for position in range(len(request.digests), len(request.tokens)):
            before = request.digests[-1] if request.digests else 1 + request.salt
            token = request.tokens[position]
            request.digests.append(hash((before, token)))

    def _content(self, request: Request, index: int) -> Content:
        size = self.size
        while len(request.contents) <= index:
            start = len(request.contents) * size
            known = request.salt, tuple(request.tokens[: start + size])
            parent = request.salt, tuple(request.tokens[:start])
            request.contents.append(Content(known, parent, tuple(request.tokens[start : start + size])))
        return request.contents[index]

    def _check_hit(self, request: Request, hit: CacheHit) -> None:
        """Assert that a hit is the longest, by looking at every block, and leaves at least one token to compute."""
        size, most = self.size, len(request.tokens) - 1
        if not self.device.caching:
            assert hit == CacheHit(())
            return
        places: list[BlockLocation] = []
        while (len(places) + 1) * size <= most:
            content = self._content(request, len(places))
            block, there = self.device.find(content), self.host.find(content)
            if block is None and there is None:
                break
            places.append(BlockLocation(there, True) if block is None else BlockLocation(block, False))
        assert hit.blocks == tuple(places)
        start = len(places) * size
        parent = request.salt, tuple(request.tokens[:start])
        rest = tuple(request.tokens[start : min(start + size, most)])
        here, there = self.device.most_common(parent, rest), self.host.most_common(parent, rest)
        assert hit.partial_tokens == max(here, there)
        if hit.partial:
            pool = self.host if hit.partial.on_host else self.device
            content = pool.known[hit.partial.block]
            assert content.parent == parent and content.tokens[: hit.partial_tokens] == rest[: hit.partial_tokens]
            assert hit.partial.on_host == (there > here)
        other = 1 - request.salt, tuple(request.tokens[:size])
        if not hit.blocks and any(one.key == other for one in self.device.known.values()):
            self.seen["same tokens under another salt"] += 1

    def _grow(self, request: Request, tokens: int) -> None:
        before = list(request.table)
        assert self.blocks.grow(request.table, tokens)
        self._collect()
        assert request.table[: len(before)] == before
        assert len(request.table) == max(len(before), self._blocks_for(tokens))
        for block in request.table[len(before) :]:
            self._take(block)

    def _plan(self, request: Request, end: int, wrong: int = 0) -> None:
        self.writes[request] = request.computed, end
        request.computed, request.wrong = end + wrong, wrong

    def _collect(self) -> None:
        self.new_outs.extend(self.blocks.offload.take_moves_out())

    def _take(self, block: int) -> None:
        if self.device.take(block):
            self._forget(block)
            self.seen["eviction"] += 1

    def _forget(self, block: int) -> None:
        """Follow an eviction: the content is on the host already, is offloaded, or is dropped."""
        self.fresh.pop(block, None)
        self.seen["scores evicted"] += block in self.device.scores
        content, digests = self.device.forget(block)
        if self.host.find(content) is not None or self.host.num_available:
            self.host.drop(self._out(block, (content, digests)))
            self.seen["eviction offloaded"] += 1

    def _out(self, block: int, known: Known) -> int:
        there = self.host.find(known[0]) if known else None
        if there is not None:
            self.host.hold(there)
            return there
        move = self.new_outs.popleft()
        assert move.source == block
        self._take_on_host(move.target)
        if known and self.host.caching:
            self.host.know(move.target, *known)
        self.host.lock(move.target)
        self.moves_out.append(move)
        return move.target

    def _take_on_host(self, block: int) -> None:
        if self.host.take(block):
            self.host.forget(block)
            self.seen["eviction on the host"] += 1

    def _arrival(self, move: BlockTransfer, source: int, target: int, *, known: bool) -> tuple[BlockTransfer, Known]:
        assert (move.source, move.target) == (source, target)
        self._take(target)
        self.device.lock(target)
        content = self.host.known.get(source) if known else None
        assert (move.entry and move.entry.tokens) == (content and content.tokens)
        return move, content and (content, self.host.digests[source])

    def _drop_all(self, pool: PoolModel, table: list[int]) -> None:
        for block in reversed(table):
            pool.drop(block)

    def _refused(self, call: Callable[[], object], name: str) -> None:
        """Assert that a call is refused and changes nothing, byte for byte."""
        self.seen[f"{name} is refused"] += 1
        if self.seen[f"{name} is refused"] % BYTES_EVERY:
            assert not call()
            return
        before = snapshot(self.blocks)
        assert not call()
        assert snapshot(self.blocks) == before, f"{name} was refused, but has changed something"
