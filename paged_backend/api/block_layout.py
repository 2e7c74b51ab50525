"""The kinds of layers of a model, and how many pages of the KV cache its sequences need.

A block holds the keys and values of `block_size` tokens for all layers of one kind. It consists of pages, the unit in
which a pool allocates memory. All pages have the same size, so that a freed page can be used for any kind:

    block of a sequence     0     1     2     3     4     5
    full attention          17    4     9     22    30    8       one page each
    window of two blocks    -     -     -     14,6  2,40  31,5    two pages each; freed when no later token reads them
    recurrent layers        -     -     -     -     -     7,8     the states after all tokens so far, in two pages
    packed layers           3     8     12    19    25    41      in four bits, filled with the last token of the block
      their edges           6     -     -     -     -     28      the first block and the newest one, in eight bits

Most models have one kind of layer, whose blocks are single pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

MAX_LENGTH = 2**31  # above the length of any sequence; with windows alone, a small pool has room for it


@dataclass(frozen=True)
class LayerKind:
    """Layers whose blocks are allocated and freed together. Layers of this class keep all blocks: full attention.

    A subclass for another kind of attention sets `keeps_all`, and overrides all methods and properties but `held`.
    """

    keeps_all: ClassVar[bool] = True  # whether later tokens read every block before them
    caches_freed: ClassVar[bool] = True  # whether the prefix cache keeps full blocks that no later token reads

    pages: int = 1  # pages of a block; 0: it only stands for its tokens, in a model without attention

    @property
    def description(self) -> str:
        """What the layers keep, for the summary of a start."""
        return "keep all tokens"

    def needed(self, num_blocks: int, block_size: int) -> range:
        """Return which of the first `num_blocks` blocks, all full, are read by later tokens. The others are freed.

        A block that is needed after `num_blocks` blocks is also needed after fewer, if it is among them. Prefix hits
        rely on it.
        """
        return range(num_blocks)

    def held(self, num_full: int, num_blocks: int, block_size: int) -> list[int]:
        """Return which of its `num_blocks` blocks a sequence holds while the first `num_full` are full."""
        return [*self.needed(num_full, block_size), *range(num_full, num_blocks)]

    def max_blocks(self, num_blocks: int, pending: int, block_size: int) -> int:
        """Return how many of `num_blocks` consecutive blocks a sequence holds at most at the same time. The first of
        them may be any block of the sequence, since samples share the blocks of the prompt.

        pending: tokens in the steps that are planned and not committed, whose blocks are not freed yet.
        """
        return num_blocks


@dataclass(frozen=True)
class WindowKind(LayerKind):
    """Layers with a sliding window."""

    keeps_all: ClassVar[bool] = False

    window: int = 1  # tokens that a query sees, with its own

    @property
    def description(self) -> str:
        return f"keep {self.window} tokens"

    def needed(self, num_blocks: int, block_size: int) -> range:
        return range(max(0, num_blocks * block_size + 1 - self.window) // block_size, num_blocks)

    def max_blocks(self, num_blocks: int, pending: int, block_size: int) -> int:
        # ceil((window - 1) / size) blocks up to the end of the last full one, and after it ceil((size - 1 + pending) /
        # size), for at most size - 1 tokens of a block that is not full and for the pending ones. This is their bound.
        return min(num_blocks, max(1, (self.window + pending - 4) // block_size + 3))


@dataclass(frozen=True)
class EdgeKind(LayerKind):
    """The first and the newest block of layers with packed blocks (`paged_kernels.packed_blocks`). All others are freed
    when they are full, as packed blocks of another kind have their content."""

    keeps_all: ClassVar[bool] = False
    caches_freed: ClassVar[bool] = False

    @property
    def description(self) -> str:
        return "keep the first and the newest block"

    def needed(self, num_blocks: int, block_size: int) -> range:
        return range(min(num_blocks, 1))

    def max_blocks(self, num_blocks: int, pending: int, block_size: int) -> int:
        return min(num_blocks, 1 + max(1, (pending + 2 * block_size - 2) // block_size))


@dataclass(frozen=True)
class StateKind(LayerKind):
    """Recurrent layers. A sequence holds a single block, the last one of its table: the states after all of its tokens.
    A state at the end of a full block can be cached as that block of the sequence."""

    keeps_all: ClassVar[bool] = False

    @property
    def description(self) -> str:
        return "keep one state"

    def needed(self, num_blocks: int, block_size: int) -> range:
        return range(max(0, num_blocks - 1), num_blocks)

    def held(self, num_full: int, num_blocks: int, block_size: int) -> list[int]:
        return [num_blocks - 1] if num_blocks else []

    def max_blocks(self, num_blocks: int, pending: int, block_size: int) -> int:
        return min(1, num_blocks)


FULL = LayerKind()


@dataclass(frozen=True)
class BlockLayout:
    """The kinds of layers of a model, and the number of tokens in a block."""

    block_size: int
    kinds: tuple[LayerKind, ...] = (FULL,)
    max_pending: int = 0  # maximum tokens of a sequence in the steps that may be planned and not committed

    @property
    def has_null(self) -> bool:
        """Whether block tables of layers with attention may have NULL in place of blocks that were freed."""
        return any(kind.pages > 1 or not kind.keeps_all for kind in self.token_kinds)

    @property
    def state(self) -> int | None:
        """The index of the kind of recurrent layers, the last one; None if the model has no such layers."""
        return len(self.kinds) - 1 if isinstance(self.kinds[-1], StateKind) else None

    @property
    def token_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that keep something for each token: all but recurrent layers."""
        return self.kinds[: self.state]

    @property
    def pages(self) -> int:
        """The pages of a block in all kinds together."""
        return sum(kind.pages for kind in self.kinds)

    @property
    def token_pages(self) -> int:
        """The pages of a block in the kinds that keep something for each token."""
        return sum(kind.pages for kind in self.token_kinds)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def needed(self, num_blocks: int) -> list[tuple[int, int]]:
        """Return (index, kind) of the blocks that are read after a sequence's first `num_blocks`, the first index
        first."""
        kinds = enumerate(self.kinds)
        return sorted((index, place) for place, kind in kinds for index in kind.needed(num_blocks, self.block_size))

    def held(self, num_tokens: int) -> int:
        """Return the pages that a sequence with `num_tokens` computed tokens holds between steps."""
        full, blocks = num_tokens // self.block_size, self.blocks_for(num_tokens)
        return sum(kind.pages * len(kind.held(full, blocks, self.block_size)) for kind in self.kinds)

    def pages_for(self, lengths: Sequence[int], pending: Sequence[int], shared: int) -> int:
        """Return the pages that a request needs at most for all of its samples.

        Args:
            lengths: number of tokens of each sample.
            pending: number of tokens of each sample that are still to be computed.
            shared: number of leading blocks that all samples share.
        """
        blocks = list(map(self.blocks_for, lengths))
        return sum(kind.pages * self.blocks_of_kind(kind, blocks, pending, shared) for kind in self.kinds)

    def blocks_of_kind(self, kind: LayerKind, blocks: Sequence[int], pending: Sequence[int], shared: int) -> int:
        """Return the blocks of one kind that a request holds at most. blocks: number of blocks of each sample."""
        if isinstance(kind, StateKind):  # the last sample takes the state of the prompt, the others get copies
            return len(blocks)
        limits = [min(tokens, self.max_pending) for tokens in pending]
        if len(blocks) == 1:
            return kind.max_blocks(blocks[0], limits[0], self.block_size)
        own = zip(blocks, limits, strict=True)
        return kind.max_blocks(shared, limits[0], self.block_size) + sum(
            kind.max_blocks(count - shared, limit, self.block_size) for count, limit in own
        )

    def sequences(self, num_pages: int, length: int) -> int:
        """Return how many sequences of `length` tokens a pool of this size has room for, of which one is computed and
        the others are decoded. 0 if they need no pages."""
        first, others = (self.pages_for([length], [pending], 0) for pending in (length, 1))
        return max(0, 1 + (num_pages - first) // others) if others else 0

    def max_tokens(self, num_pages: int) -> int:
        """Return the length of the longest sequence for which a pool of this size has room."""
        keeps_all = any(kind.keeps_all and kind.pages for kind in self.kinds)
        lengths = range(1, num_pages * self.block_size + 1) if keeps_all else range(1, MAX_LENGTH)
        return bisect_right(lengths, num_pages, key=lambda length: self.pages_for([length], [length], 0))
