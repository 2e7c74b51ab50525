"""Copies the blocks of moved requests between engines, so that their tokens are not computed again.

engine A   read: the blocks of a sequence, in host memory
   |       frames of the local socket, a few MiB each
engine B   store: cached blocks, which the request finds when it is admitted

The prefix cache of engine B is the only place for them, so a request whose blocks were not sent, did not fit or were
evicted is computed from its tokens. The tokens after the last full block always are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.execution.runner import Runner
from paged_backend.kv.blocks import Location
from paged_backend.kv.content import BlockKey, Chain, Entry
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.utils.local_socket import FrameError

PART_BYTES = 8 << 20  # maximum bytes of blocks in one frame, unless a single block is larger


class Prefix(NamedTuple):
    """What a sequence has computed."""

    origin: Origin
    tokens: Sequence[int]  # tokens of its full blocks
    entries: Sequence[Entry]  # contents of these blocks


@dataclass(frozen=True, eq=False)
class BlockRun:
    """Consecutive blocks of a sequence for one kind of layer, as bytes."""

    origin: Origin
    tokens: Sequence[int]  # tokens of the sequence, up to the end of the last block
    first: int  # index of the first block in the sequence
    kind: int  # kind of layer
    content: Tensor  # uint8: the pages of all blocks, [num_pages, page_bytes]
    stored: threading.Event = field(default_factory=threading.Event)  # set when the engine has stored it, or cannot

    @property
    def nbytes(self) -> int:
        """The bytes of the content."""
        return self.content.nbytes

    def write(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the run as JSON values, and the bytes that follow them."""
        values = {
            "origin": [self.origin.salt, self.origin.adapter.hex()],
            "tokens": list(self.tokens),
            "first": self.first,
            "kind": self.kind,
        }
        return values, [memoryview(self.content.view(-1).numpy())]

    @classmethod
    def read(cls, values: Any, attached: bytes) -> BlockRun:
        """Return a run that another process sent. Raises FrameError if it is malformed."""
        try:
            salt, adapter = values["origin"]
            origin = Origin(str(salt), bytes.fromhex(adapter))
            tokens, first, kind = (values[name] for name in ("tokens", "first", "kind"))
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"blocks: {error!r}") from None
        for name, value in {"tokens": tokens, "first": [first], "kind": [kind]}.items():
            if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
                raise FrameError(f"blocks: {name} must be a list of numbers")
        return cls(origin, tokens, first, kind, torch.from_numpy(np.frombuffer(attached, dtype=np.uint8).copy()))


class BlockCopier:
    """Reads and stores the blocks of moved requests. Belongs to the engine's thread; no step may be planned between
    `prefixes` and `read`."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        """scheduler, runner: parts of an engine with a single rank, whose pool holds whole blocks."""
        self._blocks = scheduler.blocks
        self._runner = runner

    def prefixes(self, group: Group) -> list[Prefix]:
        """Return what a request has computed, by sequence. Called before the request is removed."""
        prefixes, size = list[Prefix](), self._blocks.block_size
        for sequence in group.active if self._blocks.caching else ():
            if full := sequence.committed // size:
                self._blocks.entry(sequence, full - 1)
                entries = sequence.chain.entries[:full]
                prefixes.append(Prefix(sequence.chain.origin, list(sequence.tokens[: full * size]), entries))
        return prefixes

    def read(self, prefixes: Sequence[Prefix]) -> list[BlockRun]:
        """Return the cached blocks of a request, which was removed. Blocks that several sequences share are returned
        once. A sequence with states continues from the latest one that is cached."""
        self._runner.copier.settle()
        known: set[BlockKey] = set()
        runs = list[BlockRun]()
        for prefix in prefixes:
            count = len(prefix.entries)
            if states := self._blocks.states:
                keys = (BlockKey(entry, states.kind) for entry in reversed(prefix.entries))
                count -= next((index for index, key in enumerate(keys) if self._blocks.locate(key)), count)
            for kind in range(len(self._blocks.layout.kinds)):
                runs += self._runs(prefix, kind, count, known)
        return runs

    def store(self, run: BlockRun) -> None:
        """Put blocks that another engine has read into the prefix cache. Blocks that do not fit are left out. Raises
        ValueError, with nothing changed, if they are not blocks of this model."""
        try:
            self._check(run)
            blocks = self._blocks
            chain, count = Chain(run.origin), len(run.tokens) // blocks.block_size
            blocks.contents.extend(chain, run.tokens, count, blocks.block_size)
            self._store_blocks(run, [BlockKey(entry, run.kind) for entry in chain.entries[run.first : count]])
        finally:
            run.stored.set()

    def _runs(self, prefix: Prefix, kind: int, count: int, known: set[BlockKey]) -> Iterator[BlockRun]:
        """Yield the blocks of one kind that are needed after `count` blocks, as far as they are cached and not `known`,
        a part at a time. The blocks of a part are in the same pool."""
        blocks, layers = self._blocks, self._blocks.layout.kinds[kind]
        most = max(1, PART_BYTES // max(1, layers.pages * self._runner.kv.page_bytes))
        part: list[tuple[int, Location]] = []
        for index in layers.needed(count, blocks.block_size):
            key = BlockKey(prefix.entries[index], kind)
            location = None if key in known else blocks.locate(key)
            known.add(key)
            follows = bool(part) and part[-1][0] == index - 1 and location and part[-1][1].on_host == location.on_host
            if part and (not follows or len(part) == most):
                yield self._run(prefix, kind, part)
                part = []
            if location:
                part.append((index, location))
        if part:
            yield self._run(prefix, kind, part)

    def _run(self, prefix: Prefix, kind: int, part: Sequence[tuple[int, Location]]) -> BlockRun:
        on_host = part[0][1].on_host
        pool, cache = (self._blocks.host, self._runner.host) if on_host else (self._blocks.pool, self._runner.kv)
        assert pool and cache
        content = cache.read([page for _, location in part for page in pool.pages_of(location.block)])
        tokens = prefix.tokens[: (part[-1][0] + 1) * self._blocks.block_size]
        return BlockRun(prefix.origin, tokens, part[0][0], kind, content)

    def _store_blocks(self, run: BlockRun, keys: Sequence[BlockKey]) -> None:
        blocks = self._blocks
        reserved = blocks.reserve(keys)
        self._finish_moves_out()
        source = {key: index for index, key in enumerate(keys)}
        pages, chosen = list[int](), list[int]()  # pages of the cache, and their places in the run
        for key, block in reserved.items():
            of_block = blocks.pool.pages_of(block)
            pages += of_block
            chosen += range(source[key] * len(of_block), (source[key] + 1) * len(of_block))
        if pages:
            content = run.content.view(-1, self._runner.kv.page_bytes)
            self._runner.kv.write(pages, content.index_select(0, torch.tensor(chosen, dtype=torch.int64)))
        blocks.insert(reserved)

    def _check(self, run: BlockRun) -> None:
        layout = self._blocks.layout
        count = len(run.tokens) / layout.block_size - run.first
        pages = layout.kinds[run.kind].pages if run.kind < len(layout.kinds) else -1
        if count < 1 or count % 1 or run.content.nbytes != count * pages * self._runner.kv.page_bytes:
            raise ValueError("the blocks of another instance have another size")

    def _finish_moves_out(self) -> None:
        """Copy evicted blocks to the host pool now, before their pages are overwritten."""
        if self._blocks.ledger.has_moves_out:
            transfers = self._blocks.ledger.take_moves_out()
            self._runner.move(Plan(transfers=transfers))
            self._runner.copier.settle()
            self._blocks.ledger.finish(transfers)


def read_blocks(frame: Mapping[str, Any]) -> BlockRun:
    """Return the blocks of a received frame. Raises FrameError."""
    return BlockRun.read(frame["blocks"], frame.get("attached", b""))
