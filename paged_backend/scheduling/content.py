"""What blocks hold: each full block is known by a key, a BLAKE2b chain over the tenant's salt and the adapter that
computed it, the key of the block before it, and its own token ids. Equal keys mean equal tokens from the first on, so
whoever asks for the same prefix finds the blocks. The tokens of each block are compared as well; that the blocks before
it hold the same, its parent's key says alone, of 32 bytes.

    salt -> k1 = H(salt, [t0..t15]) -> k2 = H(k1, [t16..t31]) -> ...
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

Key = bytes


class Entry(NamedTuple):
    """What a full block holds."""

    key: Key
    parent: Key  # of the block before it, or of the salt
    tokens: tuple[int, ...]


class Index:
    """The known blocks of one pool, by key and by what they continue."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_key: dict[Key, int] = {}
        # By the key of the block before: (tokens, block) in order, so that who shares most is a neighbour.
        self._children: dict[Key, list[tuple[tuple[int, ...], int]]] = {}

    @property
    def blocks(self) -> Set[int]:
        return self._entries.keys()

    def knows(self, block: int) -> bool:
        return block in self._entries

    def entry(self, block: int) -> Entry | None:
        return self._entries.get(block)

    def has_key(self, key: Key) -> bool:
        return key in self._by_key

    def find(self, entry: Entry) -> int | None:
        """The block that holds this. Its tokens are compared, whatever the keys say."""
        block = self._by_key.get(entry.key)
        return block if block is not None and self._entries[block] == entry else None

    def add(self, block: int, entry: Entry) -> bool:
        """Make a block known. False where its content is known already: the block that has it stays the one that is
        found."""
        if block in self._entries or entry.key in self._by_key:
            return False
        self._entries[block] = entry
        self._by_key[entry.key] = block
        insort(self._children.setdefault(entry.parent, []), (entry.tokens, block))
        return True

    def remove(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        del self._by_key[entry.key]
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, (entry.tokens, block))]
        if not siblings:
            del self._children[entry.parent]
        return entry

    def nearest_child(self, parent: Key, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """The block after `parent` that starts with most of `tokens`, and how many, if any does."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (tokens, -1))
        best, most = None, 0
        for content, block in children[max(0, place - 1) : place + 1]:
            length = _common(content, tokens)
            if length > most:
                best, most = block, length
        return None if best is None else (best, most)

    def check(self) -> None:
        """Assert every invariant; for tests and idle moments."""
        assert {entry.key: block for block, entry in self._entries.items()} == self._by_key, "keys and blocks disagree"
        for block, entry in self._entries.items():
            assert chain_key(entry.parent, entry.tokens) == entry.key, f"block {block}: not its key"
            assert (entry.tokens, block) in self._children[entry.parent], f"block {block}: an orphan"
        assert sum(map(len, self._children.values())) == len(self._entries), "a parent knows a block that is not"
        assert all(children == sorted(children) for children in self._children.values()), "children out of order"


def root_key(salt: str, adapter: bytes = b"") -> Key:
    """Where a tenant's chains begin. adapter: a digest of its content; none for the model itself."""
    return blake2b(salt.encode(), digest_size=32, key=adapter, person=b"paged_llm salt").digest()


def chain_key(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of a block that holds `tokens` after the block of key `parent`."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32, person=b"paged_llm block").digest()


def new_chain(root: Key) -> list[Entry]:
    """What a sequence's full blocks hold, before any is worked out: a root."""
    return [Entry(root, b"", ())]


def extend_chain(chain: list[Entry], tokens: Sequence[int], count: int, block_size: int) -> None:
    """Work out what a sequence's first `count` full blocks hold, as far as `chain` does not have it yet."""
    for start in range((len(chain) - 1) * block_size, count * block_size, block_size):
        parent, content = chain[-1].key, tuple(tokens[start : start + block_size])
        chain.append(Entry(chain_key(parent, content), parent, content))


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading elements two sequences share."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
