"""What blocks hold, told apart by the tokens themselves. A full block is known by its entry: its own token ids, and a
link to the entry of the block before it; the first block's is to the origin, which is whose tokens they are.

    Origin(salt, adapter)  <-  Entry [t0..t15]  <-  Entry [t16..t31]  <-  ...
                                                <-  Entry [t16..t29 and two others]

`Contents` looks an entry up by what is before it and by its tokens, and a dictionary compares both. So there is one
object for each content, and to ask whether two prefixes of any length are the same is to ask whether their last entries
are the same object. Nothing is decided by a hash: keys name files, and what those hold is compared, too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence, Set
from hashlib import blake2b
from weakref import WeakValueDictionary

from paged_backend.api.request import Origin

Key = bytes


class Entry:
    """What a full block holds, and all before it. Made by `Contents`, one for each content; any other serves for its
    prefix and its key alone."""

    __slots__ = ("__weakref__", "_key", "before", "tokens")

    def __init__(self, before: PrefixParent, tokens: tuple[int, ...]):
        self.before = before
        self.tokens = tokens
        self._key: Key = b""  # once it is asked for

    @property
    def prefix(self) -> tuple[Origin, list[int]]:
        """Whose tokens they are, and all of them, from the first on."""
        blocks, before = [self.tokens], self.before
        while isinstance(before, Entry):
            blocks.append(before.tokens)
            before = before.before
        return before, [token for tokens in reversed(blocks) for token in tokens]

    @property
    def key(self) -> Key:
        """32 bytes for a file's name, a BLAKE2b chain over the origin and the tokens of each block."""
        todo: list[Entry] = []
        last: PrefixParent = self
        while isinstance(last, Entry) and not last._key:
            todo.append(last)
            last = last.before
        key = last._key if isinstance(last, Entry) else root_key(last)
        for entry in reversed(todo):
            key = entry._key = chain_key(key, entry.tokens)
        return key


PrefixParent = Origin | Entry


class Chain:
    """What a sequence's full blocks hold, from the first on, as far as it is worked out."""

    __slots__ = ("entries", "origin")

    def __init__(self, origin: Origin, entries: Sequence[Entry] = ()):
        self.origin = origin
        self.entries = list(entries)

    def before(self, index: int) -> PrefixParent:
        """What full block `index` comes after."""
        return self.entries[index - 1] if index else self.origin

    def head(self, count: int) -> Chain:
        """The first `count` of it, to go on from in another way."""
        return Chain(self.origin, self.entries[:count])

    def copy(self) -> Chain:
        return Chain(self.origin, self.entries)


class Contents:
    """The entries of an engine's pools, one object for each content. It keeps none alive: a known block keeps its
    own, an entry those before it, an open sequence its chain. So beside the sequences' own there are never more than
    known blocks times blocks of the longest sequence, whatever comes; and, as tails are evicted before heads, hardly
    more than known blocks."""

    def __init__(self) -> None:
        self._entries: WeakValueDictionary[tuple[PrefixParent, tuple[int, ...]], Entry] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, before: PrefixParent, tokens: tuple[int, ...]) -> Entry | None:
        """The entry of this content, if anybody has it. From any thread."""
        return self._entries.get((before, tokens))

    def extend(self, chain: Chain, tokens: Sequence[int], count: int, block_size: int) -> Entry:
        """What full block `count - 1` of a sequence holds; `chain` gets those up to it. From one thread."""
        entries = chain.entries
        for start in range(len(entries) * block_size, count * block_size, block_size):
            before, content = chain.before(len(entries)), tuple(tokens[start : start + block_size])
            entry = self.find(before, content)
            if entry is None:
                entry = self._entries[before, content] = Entry(before, content)
            entries.append(entry)
        return entries[count - 1]


class Index:
    """The known blocks of one pool, by what they hold and by what they continue. All entries are of one `Contents`."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._blocks: dict[Entry, int] = {}
        # By what is before: (tokens, block) in order, so that who shares most is a neighbour.
        self._children: dict[PrefixParent, list[tuple[tuple[int, ...], int]]] = {}

    @property
    def blocks(self) -> Set[int]:
        return self._entries.keys()

    def contains(self, block: int) -> bool:
        return block in self._entries

    def entry(self, block: int) -> Entry | None:
        return self._entries.get(block)

    def find(self, entry: Entry) -> int | None:
        """The block that holds this."""
        return self._blocks.get(entry)

    def add(self, block: int, entry: Entry) -> bool:
        """Make a block known. False where its content is known already: the block that has it stays the one that is
        found."""
        if block in self._entries or entry in self._blocks:
            return False
        self._entries[block] = entry
        self._blocks[entry] = block
        insort(self._children.setdefault(entry.before, []), (entry.tokens, block))
        return True

    def remove(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        del self._blocks[entry]
        siblings = self._children[entry.before]
        del siblings[bisect_left(siblings, (entry.tokens, block))]
        if not siblings:
            del self._children[entry.before]
        return entry

    def nearest_child(self, before: PrefixParent, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """The block after `before` that starts with most of `tokens`, and how many, if any does."""
        children = self._children.get(before, [])
        place = bisect_left(children, (tokens, -1))
        best, most = None, 0
        for content, block in children[max(0, place - 1) : place + 1]:
            length = _common(content, tokens)
            if length > most:
                best, most = block, length
        return None if best is None else (best, most)

    def check(self, contents: Contents) -> None:
        """Assert every invariant; for tests and idle moments."""
        assert {entry: block for block, entry in self._entries.items()} == self._blocks, "entries and blocks disagree"
        for block, entry in self._entries.items():
            assert contents.find(entry.before, entry.tokens) is entry, f"block {block}: its content has another entry"
            assert (entry.tokens, block) in self._children[entry.before], f"block {block}: an orphan"
        assert sum(map(len, self._children.values())) == len(self._entries), "a parent knows a block that is not"
        assert all(children == sorted(children) for children in self._children.values()), "children out of order"


def root_key(origin: Origin) -> Key:
    """Where keys begin."""
    return blake2b(origin.salt.encode(), digest_size=32, key=origin.adapter, person=b"paged_llm salt").digest()


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
