"""The prefix cache: finds blocks whose content begins a sequence, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.content import Chain, Contents, Entry, PrefixParent


class BlockLocation(NamedTuple):
    """A block, and the pool that it is in."""

    block: int
    on_host: bool


@dataclass(frozen=True)
class CacheHit:
    """Cached blocks that hold the first tokens of a sequence. They are not referenced until `BlockManager.adopt`."""

    blocks: tuple[BlockLocation, ...]  # full blocks
    partial: BlockLocation | None = None  # block whose first `partial_tokens` tokens match
    partial_tokens: int = 0

    @property
    def device_blocks(self) -> list[int]:
        """The full blocks that are on the device."""
        return [location.block for location in self.blocks if not location.on_host]


NO_HIT = CacheHit(())


class PrefixCache:
    """Finds and indexes contents in the device's pool, and in the host's if there is one."""

    def __init__(self, pool: BlockPool, host: BlockPool | None, block_size: int):
        self.contents = Contents()
        self._pool = pool
        self._host = host
        self._block_size = block_size

    def match(self, chain: Chain, tokens: Sequence[int]) -> CacheHit:
        """Return the longest cached prefix of `tokens`. Changes nothing in the pools.

        The hit is at least one token shorter than `tokens`, as the last token has to be computed to sample from its
        logits. `chain` is extended by the entries that were found, so the next call for the same sequence does not
        compute them again.
        """
        if not self._pool.caching:
            return NO_HIT
        size, limit, entries = self._block_size, len(tokens) - 1, chain.entries
        locations: list[BlockLocation] = []
        for start in range(0, limit // size * size, size):
            index = len(locations)
            if index == len(entries):
                entry = self.contents.find(chain.parent_of(index), tuple(tokens[start : start + size]))
                if entry is None:
                    break
                entries.append(entry)
            location = self.find(entries[index])
            if location is None:
                break
            locations.append(location)
        start = len(locations) * size
        rest = tuple(tokens[start : min(start + size, limit)])
        return CacheHit(tuple(locations), *self._nearest(chain.parent_of(len(locations)), rest))

    def find(self, entry: Entry) -> BlockLocation | None:
        """Return where this content is cached, the device first, or None. Thread-safe."""
        block = self._pool.index.find(entry)
        if block is not None:
            return BlockLocation(block, False)
        block = self._host.index.find(entry) if self._host else None
        return None if block is None else BlockLocation(block, True)

    def entry(self, chain: Chain, tokens: Sequence[int], index: int) -> Entry:
        """Return the entry of a sequence's full block `index`, extending `chain` up to it."""
        return self.contents.extend(chain, tokens, index + 1, self._block_size)

    def add(self, block: int, chain: Chain, tokens: Sequence[int], index: int) -> bool:
        """Index a block that holds a sequence's full block `index`. Return whether it was added: of several blocks with
        the same content only the first is indexed."""
        assert self._pool.is_used(block), f"block {block}: cached, but not in use"
        if not self._pool.caching or self._pool.index.contains(block):
            return False
        return self._pool.index.add(block, self.entry(chain, tokens, index))

    def remove(self, block: int) -> bool:
        """Remove the content of a block of the device from the indexes of both pools; block tables keep the block.
        Return whether it was cached."""
        if not self._pool.index.contains(block):
            return False
        entry = self._pool.index.remove(block)
        if self._host:
            self._host.forget(entry)
        return True

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        for pool in (self._pool, self._host):
            if pool:
                pool.index.check(self.contents)

    def _nearest(self, parent: PrefixParent, tokens: tuple[int, ...]) -> tuple[BlockLocation | None, int]:
        """Return the child of `parent` with the longest common prefix with `tokens`, and its length."""
        device = self._pool.index.nearest_child(parent, tokens) or (-1, 0)
        host = (self._host.index.nearest_child(parent, tokens) if self._host else None) or (-1, 0)
        block, length = max(device, host, key=lambda found: found[1])  # prefers the device if both are equal
        return (BlockLocation(block, host[1] > device[1]), length) if length else (None, 0)
