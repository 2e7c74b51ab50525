"""Identity of block contents: token ids, not hashes, decide whether two blocks hold the same keys and values.

A full block is identified by its entry: the block's own token ids and a link to the entry of the block before it. The
first block of a sequence links to an origin (cache salt and adapter) instead.

    Origin(salt, adapter)  <-  Entry [t0..t15]  <-  Entry [t16..t31]  <-  ...
                                                <-  Entry [t16..t29 and two others]

`Contents` interns entries by (parent, tokens), so there is one object per content, and comparing two prefixes of any
length means comparing the identity of their last entries. Stores name blocks by hashes (keys), and still compare the
content.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from paged_backend.api.request import Origin
from paged_backend.api.token_outputs import TOKEN_OUTPUTS, Requested, Values

Key = bytes


class Entry:
    """The content of a block and of all blocks before it. Only the last block of a sequence may have fewer tokens than
    a full one.

    `Contents` creates the entries that the pools use, one per content. An entry that is constructed directly is only
    for reading its `prefix` and `key`.
    """

    __slots__ = ("__weakref__", "_key", "parent", "tokens")

    def __init__(self, parent: PrefixParent, tokens: tuple[int, ...]):
        self.parent = parent
        self.tokens = tokens
        self._key: Key = b""  # cached `key`, computed on first use

    @property
    def prefix(self) -> tuple[Origin, list[int]]:
        """The origin of the prefix, and all its token ids from the first to the last of this block."""
        blocks, parent = [self.tokens], self.parent
        while isinstance(parent, Entry):
            blocks.append(parent.tokens)
            parent = parent.parent
        return parent, [token for tokens in reversed(blocks) for token in tokens]

    @property
    def key(self) -> Key:
        """32 bytes that name the block in a store: a BLAKE2b chain over the origin and the tokens of each block."""
        without_key: list[Entry] = []
        last: PrefixParent = self
        while isinstance(last, Entry) and not last._key:
            without_key.append(last)
            last = last.parent
        key = last._key if isinstance(last, Entry) else root_key(last)
        for entry in reversed(without_key):
            key = entry._key = chain_key(key, entry.tokens)
        return key


PrefixParent = Origin | Entry


class BlockKey(NamedTuple):
    """What a full block holds: a content, for the layers of one kind."""

    entry: Entry
    kind: int = 0

    @property
    def name(self) -> str:
        """The name of the block in a store."""
        return self.entry.key.hex() + (f"-{self.kind}" if self.kind else "")


class Chain:
    """The entries of a sequence's full blocks, from the first block on, as far as they have been computed."""

    __slots__ = ("entries", "origin")

    def __init__(self, origin: Origin, entries: Sequence[Entry] = ()):
        self.origin = origin
        self.entries = list(entries)

    def parent_of(self, index: int) -> PrefixParent:
        """Return the parent of full block `index`."""
        return self.entries[index - 1] if index else self.origin

    def head(self, count: int) -> Chain:
        """Return a copy of the first `count` entries, for a sequence that diverges after them."""
        return Chain(self.origin, self.entries[:count])


class Contents:
    """The entries of an engine's pools, one object per content, weakly referenced.

    A cached block keeps its own entry alive, an entry keeps its parent, and a sequence keeps its chain. The number of
    entries is therefore at most (entries of open sequences) + (cached blocks) x (blocks of the longest sequence). As
    tails are evicted before heads, it stays close to the number of cached blocks.
    """

    def __init__(self) -> None:
        self._entries: WeakValueDictionary[tuple[PrefixParent, tuple[int, ...]], Entry] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, parent: PrefixParent, tokens: tuple[int, ...]) -> Entry | None:
        """Return the entry of this content, or None. Thread-safe."""
        return self._entries.get((parent, tokens))

    def intern(self, parent: PrefixParent, tokens: tuple[int, ...]) -> Entry:
        """Return the entry of this content, which is made if there is none. Not thread-safe."""
        entry = self.find(parent, tokens)
        if entry is None:
            entry = self._entries[parent, tokens] = Entry(parent, tokens)
        return entry

    def extend(self, chain: Chain, tokens: Sequence[int], count: int, block_size: int) -> Entry:
        """Extend `chain` to `count` entries and return the last. Not thread-safe.

        tokens: the sequence's token ids, at least `count * block_size`.
        """
        entries = chain.entries
        for start in range(len(entries) * block_size, count * block_size, block_size):
            entries.append(self.intern(chain.parent_of(len(entries)), tuple(tokens[start : start + block_size])))
        return entries[count - 1]


DEVICE, HOST = "GPU", "CPU"  # names of the pools in vLLM's events; the device may be a CPU


class CacheEvent(NamedTuple):
    """A change of the contents of one pool."""

    stored: bool  # False: removed
    entry: Entry
    medium: str  # DEVICE or HOST


Listener = Callable[[CacheEvent], object]


class PrefixIndex:
    """The cached contents of one pool and one kind of layer: blocks by entry and by parent. All entries come from one
    `Contents`."""

    def __init__(self, listener: Listener | None = None, medium: str = DEVICE) -> None:
        """listener: receives every content that is added or removed. medium: name of the pool in these events."""
        self._listener = listener
        self._medium = medium
        self._entries: dict[int, Entry] = {}
        self._blocks: dict[Entry, int] = {}
        # Children by parent, as sorted (tokens, block): the child with the longest common prefix is a neighbour.
        self._children: dict[PrefixParent, list[tuple[tuple[int, ...], int]]] = {}
        self.scores: dict[
            int, BlockScores
        ] = {}  # optional outputs of the prompt tokens in indexed blocks, as far as known

    @property
    def blocks(self) -> Set[int]:
        return self._entries.keys()

    def contains(self, block: int) -> bool:
        return block in self._entries

    def entry(self, block: int) -> Entry | None:
        """Return the content of a block, or None if it is not indexed."""
        return self._entries.get(block)

    def find(self, entry: Entry) -> int | None:
        """Return the block that holds this content, or None. Thread-safe."""
        return self._blocks.get(entry)

    def add(self, block: int, entry: Entry) -> bool:
        """Index a block by its content. False, with nothing changed, if another block holds the same content."""
        if block in self._entries or entry in self._blocks:
            return False
        self._entries[block] = entry
        self._blocks[entry] = block
        insort(self._children.setdefault(entry.parent, []), (entry.tokens, block))
        if self._listener:
            self._listener(CacheEvent(True, entry, self._medium))
        return True

    def remove(self, block: int) -> Entry:
        """Remove an indexed block and return its content."""
        entry = self._entries.pop(block)
        self.scores.pop(block, None)
        del self._blocks[entry]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, (entry.tokens, block))]
        if not siblings:
            del self._children[entry.parent]
        if self._listener:
            self._listener(CacheEvent(False, entry, self._medium))
        return entry

    def nearest_child(self, parent: PrefixParent, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the child of `parent` with the longest common prefix with `tokens`, and that length; None if 0."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (tokens, -1))
        best, longest = None, 0
        for content, block in children[max(0, place - 1) : place + 1]:
            length = _common_prefix_length(content, tokens)
            if length > longest:
                best, longest = block, length
        return None if best is None else (best, longest)

    def check(self, contents: Contents) -> None:
        """Assert every invariant. For tests and idle moments."""
        assert {entry: block for block, entry in self._entries.items()} == self._blocks, "entries and blocks disagree"
        for block, entry in self._entries.items():
            assert contents.find(entry.parent, entry.tokens) is entry, f"block {block}: not the entry of its content"
            assert (entry.tokens, block) in self._children[entry.parent], f"block {block}: missing among the children"
        assert self.scores.keys() <= self._entries.keys(), "scores of a block that is not indexed"
        assert sum(map(len, self._children.values())) == len(self._entries), "a child is not indexed"
        assert all(children == sorted(children) for children in self._children.values()), "children out of order"


def root_key(origin: Origin) -> Key:
    """Return the key that the first block's key is derived from."""
    return blake2b(origin.salt.encode(), digest_size=32, key=origin.adapter, person=b"paged_llm salt").digest()


def chain_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a block that holds `tokens` after the block with key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32, person=b"paged_llm block").digest()


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


class _Packed(NamedTuple):
    """The values of one output, in little memory."""

    num_top: int  # how many of the most likely tokens they describe
    values: Any


class BlockScores:
    """The optional outputs of the prompt tokens of a cached block, which later requests then need not compute again.

    They are kept with blocks only if the engine computes the same logits for the same tokens in every batch. The first
    token of a block is scored from the logits of the position before the block:

        position of the logits     3    4    5    6   |  7    8 ...
        token that they score      4    5    6    7   |  8    9 ...
                                |<---- block 1 ---->|
    """

    def __init__(self, packed: Mapping[str, _Packed]):
        self._packed = packed

    @classmethod
    def of(cls, requested: Requested, values: Values) -> BlockScores:
        """Return the scores of a request: for each output that it requested, the values of all tokens of the block."""
        return cls({name: _Packed(top, TOKEN_OUTPUTS[name].pack(values[name])) for name, top in requested.items()})

    def cover(self, requested: Requested) -> bool:
        """Return whether a request finds all values that it needs."""
        return all(name in self._packed and top <= self._packed[name].num_top for name, top in requested.items())

    def values(self, requested: Requested) -> Values:
        """Return the values that a request needs, which these scores cover."""
        values = {}
        for name, top in requested.items():
            output = TOKEN_OUTPUTS[name]
            values[name] = [output.narrowed(value, top) for value in output.unpack(self._packed[name].values)]
        return values

    def merged(self, other: BlockScores | None) -> BlockScores:
        """Return scores that cover what either of the two covers."""
        if other is None:
            return self
        names = self._packed.keys() | other._packed.keys()
        both = {name: [scores._packed[name] for scores in (self, other) if name in scores._packed] for name in names}
        return BlockScores({name: max(packed, key=lambda values: values.num_top) for name, packed in both.items()})
