"""How the layers of a model divide a block into pages, and how many pages sequences need.

A page holds the keys and values of some layers for `block_size` tokens. It is the unit in which a pool allocates
memory. Without sliding windows, a block is a single page. With them, a block has base pages, for the layers whose
queries see all tokens, and window pages, which are freed as soon as no query can see their tokens:

    block          0     1     2     3     4     5
    base page      17    4     9     22    30    8       full attention
    window pages   -     -     -     14,6  2,40  31,5    sliding window of two blocks; each page holds as many layers
                                                         as a base page
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LENGTH = 2**31  # above the length of any sequence; with windows alone, a small pool has room for it


@dataclass(frozen=True)
class BlockLayout:
    """The pages of a block, and when its window pages are freed."""

    block_size: int
    base_pages: int = 1  # pages that are kept as long as the block
    window_pages: int = 0  # pages that are freed when the block has left the window
    window: int = 0  # tokens that a query sees in the layers of the window pages, with its own
    max_pending: int = 0  # maximum tokens of a sequence in the steps that may be planned and not committed

    @property
    def pages(self) -> int:
        """The pages of a block that is in the window."""
        return self.base_pages + self.window_pages

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def window_start(self, position: int) -> int:
        """Return the first block whose window pages a query at `position`, or after it, can see."""
        return max(0, position + 1 - self.window) // self.block_size if self.window_pages else 0

    def kept_from(self, committed: int) -> int:
        """Return the first block that keeps its window pages when `committed` tokens have been computed.

        Those are the blocks that a query after the last full block can see, so that a later request can continue from
        the cached full blocks.
        """
        return self.window_start(committed // self.block_size * self.block_size)

    def max_blocks_in_window(self, pending: int) -> int:
        """Return the maximum number of a sequence's blocks that have window pages while its last `pending` tokens are
        computed. The steps in flight, and the offset of the window within a block, are included."""
        pending = min(pending, self.max_pending)
        return max(1, (self.window + pending - 4) // self.block_size + 3)

    def pages_for(self, lengths: Sequence[int], pending: Sequence[int], shared: int) -> int:
        """Return the pages that a request needs at most for all of its samples.

        Args:
            lengths: number of tokens of each sample.
            pending: number of tokens of each sample that are still to be computed.
            shared: number of leading blocks that all samples share.
        """
        blocks = list(map(self.blocks_for, lengths))
        pages = self.base_pages * (sum(blocks) - (len(blocks) - 1) * shared)
        return pages + self.window_pages_for(blocks, pending, shared) if self.window_pages else pages

    def max_tokens(self, num_pages: int) -> int:
        """Return the length of the longest sequence for which a pool of this size has room."""
        lengths = range(1, num_pages * self.block_size + 1) if self.base_pages else range(1, MAX_LENGTH)
        return bisect_right(lengths, num_pages, key=lambda length: self.pages_for([length], [length], 0))

    def window_pages_for(self, blocks: Sequence[int], pending: Sequence[int], shared: int) -> int:
        """Return the window pages among `pages_for`. blocks: number of blocks of each sample."""
        if not self.window_pages:
            return 0
        if len(blocks) == 1:
            return self.window_pages * min(blocks[0], self.max_blocks_in_window(pending[0]))
        own = zip(blocks, pending, strict=True)
        count = min(shared, self.max_blocks_in_window(pending[0]))
        count += sum(min(each - shared, self.max_blocks_in_window(left)) for each, left in own)
        return self.window_pages * count
