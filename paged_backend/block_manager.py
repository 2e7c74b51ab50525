"""Which block belongs to whom. Integers only: no tensor is in sight here.

pool   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |     one physical block = block_size slots in every layer
free    [5, 2, 7, 0]                          a stack: the block freed last is warm in the cache, and goes first
owned   {1, 3, 4, 6}                          each in exactly one sequence's block table
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockManager:
    """Hands out the blocks of a fixed pool. Free + used = total, always; `check()` proves it."""

    def __init__(self, num_blocks: int, block_size: int):
        assert num_blocks >= 1 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None with nothing changed where fewer are free."""
        assert count >= 0, count
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = 1
        return blocks

    def grow(self, table: list[int], num_tokens: int) -> bool:
        """Extend a block table to hold `num_tokens` tokens; False, with nothing changed, where the pool is dry."""
        blocks = self.allocate(max(0, self.blocks_for(num_tokens) - len(table)))
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def release(self, table: list[int]) -> None:
        """Take back a whole block table, and empty it. Raises ValueError for a block that is not in use."""
        for block in table:
            if not 0 <= block < self.num_blocks or not self._used[block]:
                raise ValueError(f"block {block}: released, but not in use")
            self._used[block] = 0
        self._free.extend(reversed(table))
        table.clear()

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert every invariant, against all live block tables. For tests and idle moments: it walks the pool."""
        owned = [block for table in tables for block in table]
        assert len(owned) == len(set(owned)), "a block stands in two tables"
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert not set(owned) & set(self._free), "a block is free and owned"
        assert len(owned) + len(self._free) == self.num_blocks, "a block is lost"
        assert sum(self._used) == len(owned), "the used map disagrees with the tables"
        assert all(self._used[block] for block in owned), "an owned block is not marked"
