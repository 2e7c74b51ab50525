"""The number of blocks and pages that sequences need, by kind of layer."""

import itertools

import pytest

from paged_backend.api.block_layout import FULL, BlockLayout, EdgeKind, LayerKind, StateKind, WindowKind
from tests.support.shadow import FirstOfStride

WINDOW = WindowKind(pages=5, window=512)
LAYOUT = BlockLayout(16, (FULL, WINDOW), max_pending=4096)


def test_full_attention_needs_every_block():
    layout = BlockLayout(16)
    assert layout.pages_for([33], [33], 0) == 3
    assert layout.pages_for([33, 40], [1, 1], 1) == 1 + 2 * 2
    assert layout.max_tokens(8) == 128
    assert FULL.keeps_all and FULL.needed(5, 16) == range(5)
    assert not WINDOW.keeps_all


@pytest.mark.parametrize(("num_blocks", "first"), [(0, 0), (31, 0), (32, 0), (33, 1), (62, 30)])
def test_first_block_that_later_tokens_read(num_blocks, first):
    """The query after 33 blocks is at position 528, and sees position 17."""
    assert WINDOW.needed(num_blocks, 16) == range(first, num_blocks)


@pytest.mark.parametrize(
    "kind", [FULL, WindowKind(1, 1), WindowKind(1, 7), WindowKind(1, 33), EdgeKind(), FirstOfStride(stride=16)]
)
def test_a_block_that_is_needed_was_needed_before(kind):
    """A prefix hit of fewer blocks is not possible without it."""
    for count in range(40):
        assert {block for block in kind.needed(count + 1, 4) if block < count} <= set(kind.needed(count, 4))


KINDS = [WindowKind(1, window) for window in (1, 2, 5, 16, 33)]
KINDS += [EdgeKind(), FirstOfStride(stride=16), FirstOfStride(stride=64)]


@pytest.mark.parametrize(("block_size", "kind"), list(itertools.product([1, 2, 4, 16], KINDS)), ids=str)
def test_bound_of_blocks_that_are_held(block_size, kind):
    """It holds for every number of committed and pending tokens. With windows, some reach it."""
    layout = BlockLayout(block_size, (kind,), max_pending=1000)
    for pending in (1, 2, 7, 64):
        for start in (1, getattr(kind, "window", 0) + 1):
            held = {
                committed: len(kind.needed(committed // block_size, block_size))
                + layout.blocks_for(committed + pending)
                - committed // block_size
                for committed in range(start, start + 8 * block_size)
            }
            for committed, count in held.items():
                assert count <= kind.max_blocks(layout.blocks_for(committed + pending), pending, block_size)
    if isinstance(kind, EdgeKind):
        assert kind.max_blocks(10**6, 64, block_size) == max(held.values())
    if isinstance(kind, WindowKind):
        assert kind.max_blocks(10**6, 64, block_size) <= max(held.values()) + 1


def test_a_long_sequence_needs_the_pages_of_its_window_only():
    blocks = LAYOUT.blocks_for(32_768)
    decode = LAYOUT.pages_for([32_768], [1], 0)
    assert decode <= 1.05 * (blocks + 5 * 512 / 16)
    assert LAYOUT.pages_for([32_768], [32_768], 0) == blocks + 5 * WINDOW.max_blocks(blocks, 4096, 16)


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW), (FULL, EdgeKind(2)), (FULL, StateKind(7))])
def test_sequences_of_a_pool(kinds):
    """One is computed, with the tokens of two steps pending, while the others are decoded."""
    layout = BlockLayout(16, kinds, max_pending=128)
    for pages in range(200, 800, 7):
        count = layout.sequences(pages, 320)
        assert layout.pages_for([320], [320], 0) + (count - 1) * layout.pages_for([320], [1], 0) <= pages
        assert layout.pages_for([320], [320], 0) + count * layout.pages_for([320], [1], 0) > pages
    assert layout.sequences(3, 320) == 0


def test_samples_share_the_blocks_of_the_prompt():
    alone = LAYOUT.pages_for([320], [320], 0)
    both = LAYOUT.pages_for([336, 336], [336, 336], 20)
    assert both == alone + 2 * LAYOUT.pages == alone + 2 * 6


@pytest.mark.parametrize("kinds", [(FULL, WINDOW), (WINDOW, WindowKind(1, 64)), (FULL, FirstOfStride(3), WINDOW)])
def test_longest_sequence_of_a_pool(kinds):
    layout = BlockLayout(16, kinds, max_pending=128)
    for pages in (30, 100, 230):
        longest = layout.max_tokens(pages)
        assert layout.pages_for([longest], [longest], 0) <= pages
        assert longest == 2**31 - 1 or layout.pages_for([longest + 1], [longest + 1], 0) > pages
    assert (longest == 2**31 - 1) == (FULL not in kinds)


def test_recurrent_layers_keep_one_state_of_each_sequence():
    """They are the last kind, and not one that keeps tokens. A hit needs the state after its last block."""
    layout = BlockLayout(16, (FULL, StateKind(7)))
    assert (layout.state, layout.token_kinds, layout.token_pages, layout.pages) == (1, (FULL,), 1, 8)
    assert not layout.has_null
    assert layout.pages_for([33], [33], 0) == 3 + 7
    assert layout.pages_for([33, 40, 1], [1, 1, 1], 0) == 3 + 3 + 1 + 3 * 7
    assert StateKind(7).needed(5, 16) == range(4, 5) and not StateKind(7).needed(0, 16)
    assert StateKind(7).held(2, 5, 16) == [4] and StateKind(7).held(0, 0, 16) == []
    assert LAYOUT.state is None and LAYOUT.token_kinds == LAYOUT.kinds and LAYOUT.has_null
    assert WINDOW.held(33, 35, 16) == list(range(1, 35))


def test_without_attention_tokens_take_no_pages():
    layout = BlockLayout(16, (LayerKind(0), StateKind(1)))
    assert layout.pages_for([10**6], [1], 0) == 1
    assert layout.max_tokens(1) == 2**31 - 1
    assert not layout.has_null
