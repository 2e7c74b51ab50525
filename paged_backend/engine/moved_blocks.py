"""Copies the blocks of moved requests between engines, so that their tokens are not computed again.

engine A   read: the blocks of a sequence, and the recurrent state after them, in host memory
   |       frames of the local socket, a few MiB each
engine B   store: cached blocks and a checkpoint, which the request finds when it is admitted

The prefix cache of engine B is the only place for them, so a request whose blocks were not sent, did not fit or were
evicted is computed from its tokens. The tokens after the last full block always are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.request import Origin
from paged_backend.execution.runner import Runner
from paged_backend.memory.kv_cache import KVCache
from paged_backend.scheduling.content import Chain, Entry
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group
from paged_backend.utils.local_socket import FrameError

PART_BYTES = 8 << 20  # of the blocks that are sent in one frame, unless a single block is larger

Prefix: TypeAlias = tuple[Origin, Sequence[int], Sequence[Entry]]  # origin, tokens, and contents of the full blocks


@dataclass(frozen=True, eq=False)
class BlockRun:
    """Consecutive blocks of a sequence, as bytes."""

    origin: Origin
    tokens: Sequence[int]  # of the sequence, up to the end of the last block
    first: int  # index of the first block in the sequence
    pages: Sequence[int]  # number of pages of each block; fewer than its layout has if it has left the window
    content: Sequence[Tensor]  # uint8: for each tensor of the KV cache the pages of all blocks, one after the other
    state: Sequence[Tensor] = ()  # uint8: for each tensor of the state cache the state after the last block
    stored: threading.Event = field(default_factory=threading.Event)  # set when the engine has stored it, or cannot

    @property
    def nbytes(self) -> int:
        """The bytes of content and state."""
        return sum(part.numel() for part in (*self.content, *self.state))

    def write(self) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the run as JSON values, and the bytes that follow them."""
        values = {
            "origin": [self.origin.salt, self.origin.adapter.hex()],
            "tokens": list(self.tokens),
            "first": self.first,
            "pages": list(self.pages),
            "content": [part.numel() for part in self.content],
            "state": [part.numel() for part in self.state],
        }
        return values, [memoryview(part.numpy()) for part in (*self.content, *self.state)]

    @classmethod
    def read(cls, values: Any, attached: bytes) -> BlockRun:
        """Return a run that another process sent. Raises FrameError if it is malformed."""
        try:
            salt, adapter = values["origin"]
            numbers = {name: values[name] for name in ("tokens", "pages", "content", "state")}
            origin, first = Origin(str(salt), bytes.fromhex(adapter)), values["first"]
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"blocks: {error!r}") from None
        for name, value in (numbers | {"first": [first]}).items():
            if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
                raise FrameError(f"blocks: {name} must be a list of numbers")
        sizes = [*numbers["content"], *numbers["state"]]
        if sum(sizes) != len(attached):
            raise FrameError(f"blocks: {len(attached)} bytes are attached, not {sum(sizes)}")
        whole = torch.from_numpy(np.frombuffer(attached, dtype=np.uint8).copy())
        parts = [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        count = len(numbers["content"])
        return cls(origin, numbers["tokens"], first, numbers["pages"], parts[:count], parts[count:])


class BlockCopier:
    """Reads and stores the blocks of moved requests. Belongs to the engine's thread; no step may be planned between
    `prefixes` and `read`."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        """The engine must have a single rank, whose pool holds whole blocks."""
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._runner = runner

    def prefixes(self, group: Group) -> list[Prefix]:
        """Return what a request has computed, by sequence. Called before the request is removed."""
        found, size = list[Prefix](), self._blocks.block_size
        for sequence in group.active if self._blocks.caching else ():
            if full := sequence.committed // size:
                self._blocks.cache.entry(sequence.chain, sequence.tokens, full - 1)
                entries = sequence.chain.entries[:full]
                found.append((sequence.chain.origin, list(sequence.tokens[: full * size]), entries))
        return found

    def read(self, prefixes: Sequence[Prefix]) -> list[BlockRun]:
        """Return the cached blocks of a request, which was removed, and the latest checkpoint of each sequence. Blocks
        that several sequences share are returned once."""
        self._runner.transfers.settle()
        known: set[Entry] = set()
        runs = list[BlockRun]()
        for origin, tokens, entries in prefixes:
            first = next((index for index, entry in enumerate(entries) if entry not in known), len(entries))
            known.update(entries)
            runs += self._runs(origin, tokens, entries, first)
        return runs

    def store(self, run: BlockRun) -> None:
        """Put blocks that another engine has read into the prefix cache, and the state as a checkpoint. Those that do
        not fit are left out. Raises ValueError, with nothing changed, if they are not blocks of this model."""
        try:
            self._store(run)
        finally:
            run.stored.set()

    def _runs(self, origin: Origin, tokens: Sequence[int], entries: Sequence[Entry], first: int) -> Iterator[BlockRun]:
        """Yield the blocks from index `first` on, up to the first that is not cached, a part at a time. A part ends at
        the checkpoint."""
        size, checkpoint = self._blocks.block_size, self._checkpoint(entries)
        ends = [checkpoint, len(entries)] if checkpoint else [len(entries)]
        for end in ends:
            while first < end:
                placed = self._places(entries[first:end])
                if not placed:
                    return
                on_host, pages = placed
                cache = self._runner.host if on_host else self._runner.kv
                assert cache
                last = first + len(pages)
                state = self._read_state(entries[last - 1]) if last == checkpoint else []
                content = _read_pages(cache, [page for block in pages for page in block])
                counts = [len(block) for block in pages]
                yield BlockRun(origin, tokens[: last * size], first, counts, content, state)
                first = last

    def _places(self, entries: Sequence[Entry]) -> tuple[bool, list[tuple[int, ...]]] | None:
        """Return the pages of the first blocks, as many as are in the same pool and fit a part; None if the first one
        is in neither pool. A block without pages has left the window of every layer."""
        where: bool | None = None
        pages: list[tuple[int, ...]] = []
        nbytes, per_page = 0, sum(_page_bytes(self._runner.kv))
        for entry in entries:
            location = self._blocks.cache.find(entry)
            if location is None:
                if self._blocks.layout.base_pages:
                    break
                pages.append(())
                continue
            pool = self._blocks.host if location.on_host else self._blocks.pool
            assert pool
            of_block = pool.pages_of(location.block)
            nbytes += per_page * len(of_block)
            if where not in (None, location.on_host) or (nbytes > PART_BYTES and any(pages)):
                break
            where = location.on_host
            pages.append(of_block)
        return (bool(where), pages) if pages else None

    def _checkpoint(self, entries: Sequence[Entry]) -> int:
        """Return the number of blocks before the latest checkpoint of a sequence; 0 without one."""
        slots = self._scheduler.states.pool
        if slots is None:
            return 0
        found = (count for count in range(len(entries), 0, -1) if slots.index.find(entries[count - 1]) is not None)
        return next(found, 0)

    def _read_state(self, entry: Entry) -> list[Tensor]:
        slots, states = self._scheduler.states.pool, self._runner.states
        assert slots and states
        slot = slots.index.find(entry)
        assert slot is not None
        return [_bytes_of(part) for part in states.read_slot(slot)]

    def _store(self, run: BlockRun) -> None:
        self._check(run)
        blocks, chain = self._blocks, Chain(run.origin)
        new, offset = list[tuple[Entry, range]](), 0  # contents that are not cached, and their pages in the run
        for index, count in enumerate(run.pages, run.first):
            entry = blocks.cache.entry(chain, run.tokens, index)
            if count and blocks.cache.find(entry) is None:
                new.append((entry, range(offset, offset + count)))
            offset += count
        held = []
        for entry, source in new:
            allocated = blocks.pool.allocate(1, trimmed=int(len(source) < blocks.layout.pages))
            if allocated is None:
                break
            held.append((entry, source, allocated[0]))
        self._finish_moves_out()
        pages = [page for _, _, block in held for page in blocks.pool.pages_of(block)]
        _write_pages(self._runner.kv, pages, run.content, [at for _, source, _ in held for at in source])
        for entry, _, block in held:
            blocks.pool.index.add(block, entry)
            blocks.offload.block_cached(block)
        for _, _, block in reversed(held):  # the tail is evicted before the head
            blocks.pool.free(block)
        if run.state and self._runner.states:
            slot = self._scheduler.states.add_checkpoint(chain.entries[-1])
            if slot is not None:
                values = zip(run.state, self._runner.states.tensors, strict=True)
                self._runner.states.write_slot(slot, [part.view(to.dtype).view(to.shape[1:]) for part, to in values])

    def _check(self, run: BlockRun) -> None:
        layout, num_pages = self._blocks.layout, sum(run.pages)
        states = self._runner.states
        sizes = [num_pages * nbytes for nbytes in _page_bytes(self._runner.kv)]
        state_sizes = [tensor[0].nbytes for tensor in states.tensors] if states and run.state else []
        if (
            not run.pages
            or not set(run.pages) <= {0, layout.base_pages, layout.pages}
            or len(run.tokens) != (run.first + len(run.pages)) * layout.block_size
            or [part.numel() for part in run.content] != sizes
            or [part.numel() for part in run.state] != state_sizes
        ):
            raise ValueError("the blocks of another instance have another size")

    def _finish_moves_out(self) -> None:
        """Copy evicted blocks to the host pool now, before their pages are overwritten."""
        if self._blocks.offload.has_moves_out:
            plan = Plan((), moves_out=self._blocks.offload.take_moves_out())
            self._runner.move(plan)
            self._runner.transfers.settle()
            self._blocks.offload.finish_moves_out(plan.moves_out)


def read_blocks(frame: Mapping[str, Any]) -> BlockRun:
    """Return the blocks of a received frame. Raises FrameError."""
    return BlockRun.read(frame["blocks"], frame.get("attached", b""))


def _page_bytes(cache: KVCache) -> list[int]:
    """Return the bytes of a page in each tensor of a cache."""
    return [tensor[0].nbytes for tensor in cache.tensors]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _read_pages(cache: KVCache, pages: Sequence[int]) -> list[Tensor]:
    """Return a copy of pages on the host: for each tensor of the cache their bytes, one page after the other."""
    index = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    return [_bytes_of(_elements(tensor)[index].cpu()) for tensor in cache.tensors]


def _write_pages(cache: KVCache, pages: Sequence[int], content: Sequence[Tensor], source: Sequence[int]) -> None:
    """Overwrite pages of a cache. content: what `_read_pages` returned. source: for each page of `pages`, the number of
    its new content among the pages in `content`."""
    index, chosen = torch.tensor(pages, dtype=torch.int64, device=cache.device), torch.tensor(source, dtype=torch.int64)
    for tensor, values in zip(cache.tensors, content, strict=True):
        elements = _elements(tensor)
        shaped = values.view(elements.dtype).view(-1, *elements.shape[1:])
        elements[index] = shaped[chosen].to(cache.device)


def _elements(tensor: Tensor) -> Tensor:
    """Return a tensor of 8-bit numbers as integers: PyTorch cannot index FP8 on every device."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
