"""Which block belongs to whom. Integers only: no tensor is in sight here.

pool     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     one physical block = block_size slots in every layer
free     [5, 2]                                a stack: the block freed last is warm in the cache, and goes first
cached   7 -> 0                                released with their content known, least recently used first
in use   {1: 1, 3: 2, 4: 1, 6: 3}              how many block tables hold each

A full block is known by a key: a BLAKE2b chain over the tenant's salt, the key of the block before it, and its own
token ids. Equal keys mean equal tokens from the first on, so whoever asks for the same prefix finds the blocks.

            salt -> k1 = H(salt, [t0..t15]) -> k2 = H(k1, [t16..t31]) -> ...
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

Key = bytes


@dataclass(frozen=True)
class Copy:
    """Copy-on-write: the whole of block `source` goes to block `target`, in every layer, before the next step."""

    source: int
    target: int


@dataclass(frozen=True)
class Hit:
    """Blocks that hold the first tokens of a sequence. Nobody's yet: `adopt` takes them."""

    blocks: tuple[int, ...]  # full ones
    partial: int | None = None  # a block whose first `partial_tokens` continue them, and the rest does not
    partial_tokens: int = 0


@dataclass
class BlockCounters:
    """What has happened to blocks since the pool was made."""

    evictions: int = 0  # cached blocks that lost their content to a newer owner
    copies: int = 0  # copy-on-write


NO_HIT = Hit(())

# What a map of the pool shows of a block: free, cached, held by so many block tables, pinned and held by none of them.
FREE, CACHED, HELD, HELD_BY_MORE, PINNED = ".", "c", "123456789", "+", "p"
_OF_COUNT = (FREE + HELD).encode().ljust(256, HELD_BY_MORE.encode())  # the mark of a block that so many hold


class BlockManager:
    """Hands out the blocks of a fixed pool and remembers what they hold. Free + cached + used = total, always;
    `check()` proves it."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = False):
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.counters = BlockCounters()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._tokens: dict[int, tuple[int, ...]] = {}  # of keyed blocks
        self._parents: dict[int, Key] = {}  # of keyed blocks
        self._by_key: dict[Key, int] = {}
        # By the key of the block before: (tokens, block) in order, so that who shares most is a neighbour.
        self._children: dict[Key, list[tuple[tuple[int, ...], int]]] = {}
        self._reading: Counter[int] = Counter()  # sources of copies that are not done yet
        self._shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks that more than one block table holds."""
        return self._shared

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None with nothing changed where fewer are available."""
        assert count >= 0, count
        if count > self.num_available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a block table to hold `num_tokens` tokens; False, with nothing changed, where the pool is dry."""
        blocks = self.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def release(self, table: list[int]) -> None:
        """Let go of a whole block table, and empty it: the tail first, so that it is evicted before the head, which
        more requests can use. Raises ValueError for a block that is not in use."""
        for block in reversed(table):
            self.drop(block)
        table.clear()

    def drop(self, block: int) -> None:
        """Let go of one block. Raises ValueError where it is not in use."""
        if not 0 <= block < self.num_blocks or not self._references[block]:
            raise ValueError(f"block {block}: released, but not in use")
        self._references[block] -= 1
        if self._references[block] == 1:
            self._shared -= 1
        elif self._references[block] == 0:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def hold(self, block: int) -> None:
        """One holder more. A cached block is in use again."""
        self._cached.pop(block, None)
        self._references[block] += 1
        if self._references[block] == 2:
            self._shared += 1

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second block table of the same blocks, the partial last one too."""
        assert all(self._references[block] for block in table), "a fork of blocks that are not in use"
        for block in table:
            self.hold(block)
        return list(table)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def is_shared(self, block: int) -> bool:
        """Whether writing into it would change what another block table reads."""
        return self._references[block] - self._reading[block] > 1

    def append_copy(self, table: list[int], source: int) -> Copy | None:
        """Extend a block table by a copy of `source`. None, with nothing changed, where the pool is dry."""
        self.hold(source)
        blocks = self.allocate(1)
        if blocks is None:
            self.drop(source)
            return None
        table.extend(blocks)
        return self._read(source, blocks[0])

    def make_writable(self, table: list[int], index: int) -> Copy | None:
        """Put a block of its own in place of a shared one. None, with nothing changed, where the pool is dry. Until
        `finish` the source of a copy is held: neither evicted nor anybody else's target."""
        blocks = self.allocate(1)
        if blocks is None:
            return None
        source, table[index] = table[index], blocks[0]
        return self._read(source, blocks[0])

    def finish(self, copies: Iterable[Copy]) -> None:
        """Let go of the sources of copies that are done, or will not be."""
        for copy in copies:
            self._reading[copy.source] -= 1
            self.drop(copy.source)

    def _read(self, source: int, target: int) -> Copy:
        self._reading[source] += 1
        self.counters.copies += 1
        return Copy(source, target)

    # --- content -------------------------------------------------------------------------------------------------

    def match(self, chain: list[Key], tokens: Sequence[int]) -> Hit:
        """The longest known prefix of `tokens`, always at least one token short of all: it must be computed, so that
        there is something to sample from. `chain` begins with a root key and gets the keys that were worked out
        here, so that the next try is a matter of looking up. Changes nothing else."""
        if not self.caching:
            return NO_HIT
        size, most = self.block_size, len(tokens) - 1
        blocks: list[int] = []
        while (len(blocks) + 1) * size <= most:
            block = self._by_key.get(self.key(chain, tokens, len(blocks)))
            if block is None:
                break
            blocks.append(block)
        start = len(blocks) * size
        partial, length = self._nearest_child(chain[len(blocks)], tuple(tokens[start : min(start + size, most)]))
        return Hit(tuple(blocks), partial, length)

    def key(self, chain: list[Key], tokens: Sequence[int], index: int) -> Key:
        """The key of a sequence's full block `index`; works out and keeps those up to it."""
        for start in range((len(chain) - 1) * self.block_size, (index + 1) * self.block_size, self.block_size):
            chain.append(chain_key(chain[-1], tokens[start : start + self.block_size]))
        return chain[index + 1]

    def adopt(self, hit: Hit) -> list[int]:
        """A block table of a hit's full blocks."""
        for block in hit.blocks:
            self.hold(block)
        return list(hit.blocks)

    def seal(self, block: int, chain: list[Key], tokens: Sequence[int], index: int) -> None:
        """Make a sequence's full block `index` known by its content. Where that is known already, the block that has
        it stays the one that is found."""
        assert self._references[block], f"block {block}: sealed, but not in use"
        if not self.caching or self._keys[block] is not None:
            return
        key = self.key(chain, tokens, index)
        if key in self._by_key:
            return
        content = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
        self._keys[block], self._tokens[block], self._parents[block] = key, content, chain[index]
        self._by_key[key] = block
        insort(self._children.setdefault(chain[index], []), (content, block))

    def forget(self) -> None:
        """Empty the cache; blocks in use keep theirs until they are released."""
        while self._cached:
            self._free.append(self._evict())

    def _nearest_child(self, parent: Key, tokens: tuple[int, ...]) -> tuple[int | None, int]:
        """The block after `parent` that starts with most of `tokens`, and how many. Copying a block costs less than
        computing even one token of it."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (tokens, -1))
        best, most = None, 0
        for content, block in children[max(0, place - 1) : place + 1]:
            length = _common(content, tokens)
            if length > most:
                best, most = block, length
        return best, most

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        """The least recently used cached block, its content forgotten."""
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        parent, content = self._parents.pop(block), self._tokens.pop(block)
        siblings = self._children[parent]
        del siblings[bisect_left(siblings, (content, block))]
        if not siblings:
            del self._children[parent]
        self.counters.evictions += 1
        return block

    def states(self) -> str:
        """One character a block, in order of their numbers. For the engine's thread: a millisecond or two for 100,000
        blocks, as only the fewer of the free and the cached are walked one by one."""
        try:
            counts = bytes(self._references)
        except ValueError:  # a count above 255
            counts = bytes([count if count < 256 else 255 for count in self._references])
        few: Iterable[int] = self._free
        mark, other = FREE, CACHED
        if len(self._cached) < len(self._free):
            few, mark, other = self._cached, other, mark
        marks = bytearray(counts.translate(other.encode() + _OF_COUNT[1:]))
        number = ord(mark)
        for block in few:
            marks[block] = number
        # Nobody can pin a block yet. Those that only a session holds become PINNED here.
        return marks.decode()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, against all live block tables. For tests and idle moments: it walks the pool."""
        owned = Counter(block for table in tables for block in table) + self._reading
        assert all(self._references[block] == owned[block] for block in range(self.num_blocks)), "a wrong count"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(self._free) & self._cached.keys(), "a block is free and cached"
        assert not (set(self._free) | self._cached.keys()) & owned.keys(), "a block is free and owned"
        assert len(owned) + len(self._free) + len(self._cached) == self.num_blocks, "a block is lost"
        assert self._shared == sum(count > 1 for count in owned.values()), "the number of shared blocks is off"
        self._check_content()

    def _check_content(self) -> None:
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {key: block for block, key in keyed.items()} == self._by_key, "keys and blocks disagree"
        assert keyed.keys() == self._tokens.keys() == self._parents.keys(), "a known block lacks its content"
        assert not keyed.keys() & set(self._free), "a free block is known"
        assert self._cached.keys() <= keyed.keys(), "a cached block is not known"
        for block, key in keyed.items():
            assert chain_key(self._parents[block], self._tokens[block]) == key, f"block {block}: not its key"
            assert (self._tokens[block], block) in self._children[self._parents[block]], f"block {block}: an orphan"
        assert sum(map(len, self._children.values())) == len(keyed), "a parent knows a block that is not"
        assert all(children == sorted(children) for children in self._children.values()), "children out of order"


def root_key(salt: str) -> Key:
    """Where a tenant's chains begin."""
    return blake2b(salt.encode(), digest_size=32, person=b"paged_llm salt").digest()


def chain_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a block that holds `tokens` after the block of key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32, person=b"paged_llm block").digest()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading elements two sequences share."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
