"""The prefix cache: finds blocks whose content begins a sequence, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.api.block_layout import BlockLayout
from paged_backend.scheduling.block_pool import BlockPool
from paged_backend.scheduling.block_scores import BlockScores
from paged_backend.scheduling.content import Chain, Contents, Entry, PrefixParent


class BlockLocation(NamedTuple):
    """A block, and the pool that it is in."""

    block: int
    on_host: bool


NO_PAGES = BlockLocation(-1, False)  # a block whose pages have all left the window, so nothing of it is needed


@dataclass(frozen=True)
class CacheHit:
    """Cached blocks that hold the first tokens of a sequence. They are not referenced until `BlockManager.adopt`."""

    blocks: tuple[BlockLocation, ...]  # full blocks
    partial: BlockLocation | None = None  # block whose first `partial_tokens` tokens match
    partial_tokens: int = 0
    window_start: int = 0  # the first block whose window pages are needed, and present

    @property
    def device_blocks(self) -> list[int]:
        """The full blocks that are on the device."""
        return [location.block for location in self.blocks if not location.on_host and location is not NO_PAGES]


NO_HIT = CacheHit(())


class PrefixCache:
    """Finds and indexes contents in the device's pool, and in the host's if there is one."""

    def __init__(self, pool: BlockPool, host: BlockPool | None, layout: BlockLayout):
        self.contents = Contents()
        self._pool = pool
        self._host = host
        self._layout = layout
        self._block_size = layout.block_size

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
        for _ in range(limit // size):
            entry = self._known_entry(chain, tokens, len(locations))
            if entry is None:
                break
            location = self.find(entry)
            if location is None:
                if self._layout.base_pages:
                    break
                location = NO_PAGES
            locations.append(location)
        if self._layout.window_pages:
            locations = self._with_window(locations, entries)
        start = len(locations) * size
        rest = tuple(tokens[start : min(start + size, limit)])
        partial, length = self._nearest(chain.parent_of(len(locations)), rest)
        return CacheHit(tuple(locations), partial, length, self._layout.window_start(start + length))

    def without_partial(self, hit: CacheHit) -> CacheHit:
        """Return the full blocks of a hit alone. A query after them can see more blocks than one after the partial
        block; `match` has checked that they have window pages."""
        start = self._layout.window_start(len(hit.blocks) * self._block_size)
        return CacheHit(hit.blocks, window_start=start)

    def _with_window(self, locations: list[BlockLocation], entries: Sequence[Entry]) -> list[BlockLocation]:
        """Return the longest beginning of `locations` whose last blocks, as far as the next query sees them, have
        window pages. A block that has them on the host only is then taken from there."""
        in_window = [self._find_with_window(entry) for entry, _ in zip(entries, locations, strict=False)]
        streaks, streak = [0], 0  # by number of blocks, how many of the last ones have window pages
        for found in in_window:
            streak = 0 if found is None else streak + 1
            streaks.append(streak)
        for count in range(len(locations), 0, -1):
            first = self._layout.window_start(count * self._block_size)
            if count - first <= streaks[count]:
                return locations[:first] + [found for found in in_window[first:count] if found is not None]
        return []

    def _find_with_window(self, entry: Entry) -> BlockLocation | None:
        for pool, on_host in ((self._pool, False), (self._host, True)):
            block = pool.index.find(entry) if pool else None
            if pool and block is not None and block not in pool.trimmed:
                return BlockLocation(block, on_host)
        return None

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

    def find_trimmed(self, block: int, chain: Chain, tokens: Sequence[int], index: int) -> int | None:
        """Return the indexed block with the content of a sequence's full block `index` that lacks the window pages,
        while `block` has them. None if there is no such block."""
        if not self._layout.window_pages or not self._pool.caching or block in self._pool.trimmed:
            return None
        found = self._pool.index.find(self.entry(chain, tokens, index))
        return found if found in self._pool.trimmed else None

    def remove_trimmed(self, block: int) -> None:
        """Remove a block of the device from its index, so that another with the same content takes its place."""
        entry = self._pool.index.entry(block)
        assert entry
        self._pool.forget(entry)

    def remove(self, block: int) -> bool:
        """Remove the content of a block of the device from the indexes of both pools; block tables keep the block.
        Return whether it was cached."""
        if not self._pool.index.contains(block):
            return False
        entry = self._pool.index.remove(block)
        if self._host:
            self._host.forget(entry)
        return True

    def clear(self) -> None:
        """Forget all contents of the device, the latest first. No block of it is in use; the host keeps its own."""
        for entry in [self._pool.index.entry(block) for block in reversed(list(self._pool.index.blocks))]:
            assert entry
            self._pool.forget(entry)

    def find_scores(self, chain: Chain, tokens: Sequence[int], index: int) -> BlockScores | None:
        """Return the prompt log probabilities of a sequence's full block `index`, if the device has it and they are
        known."""
        entry = self._known_entry(chain, tokens, index)
        block = self._pool.index.find(entry) if entry else None
        return None if block is None else self._pool.index.scores.get(block)

    def add_scores(self, chain: Chain, tokens: Sequence[int], index: int, scores: BlockScores) -> None:
        """Keep the prompt log probabilities of a sequence's full block `index` until it leaves the device's index."""
        block = self._pool.index.find(self.entry(chain, tokens, index))
        if block is not None:
            known = self._pool.index.scores
            known[block] = scores.merged(known.get(block))

    def _known_entry(self, chain: Chain, tokens: Sequence[int], index: int) -> Entry | None:
        """Return the entry of a sequence's full block `index`, extending `chain` up to it. None if there is none."""
        size, entries = self._block_size, chain.entries
        while len(entries) <= index:
            start = len(entries) * size
            entry = self.contents.find(chain.parent_of(len(entries)), tuple(tokens[start : start + size]))
            if entry is None:
                return None
            entries.append(entry)
        return entries[index]

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        for pool in (self._pool, self._host):
            if pool:
                pool.index.check(self.contents)

    def _nearest(self, parent: PrefixParent, tokens: tuple[int, ...]) -> tuple[BlockLocation | None, int]:
        """Return the child of `parent` with the longest common prefix with `tokens`, and its length."""
        device, host = (
            (pool.index.nearest_child(parent, tokens) if pool else None) or (-1, 0) for pool in (self._pool, self._host)
        )
        if device[1] and device[0] in self._pool.trimmed:
            device = (-1, 0)
        if self._host and host[1] and host[0] in self._host.trimmed:
            host = (-1, 0)
        block, length = max(device, host, key=lambda found: found[1])  # prefers the device if both are equal
        return (BlockLocation(block, host[1] > device[1]), length) if length else (None, 0)
