"""The number of pages that sequences need."""

import itertools

import pytest

from paged_backend.api.block_layout import BlockLayout

LAYOUT = BlockLayout(16, base_pages=1, window_pages=5, window=512, max_pending=4096)


def test_without_windows_pages_are_blocks():
    layout = BlockLayout(16)
    assert layout.pages_for([33], [33], 0) == 3
    assert layout.pages_for([33, 40], [1, 1], 1) == 1 + 2 * 2
    assert layout.max_tokens(8) == 128
    assert layout.window_start(1000) == layout.kept_from(1000) == 0


@pytest.mark.parametrize(("position", "first"), [(0, 0), (511, 0), (526, 0), (527, 1), (1000, 30)])
def test_first_block_that_a_query_sees(position, first):
    assert LAYOUT.window_start(position) == first


@pytest.mark.parametrize(("block_size", "window"), list(itertools.product([1, 2, 4, 16], [1, 2, 5, 16, 33])))
def test_bound_of_blocks_in_the_window(block_size, window):
    """The bound holds for every number of committed and pending tokens, and some reach it."""
    layout = BlockLayout(block_size, 1, 1, window, max_pending=1000)
    for pending in (1, 2, 7, 64):
        held = [
            layout.blocks_for(committed + pending) - layout.kept_from(committed)
            for committed in range(window, window + 8 * block_size)
        ]
        assert max(held) <= layout.max_blocks_in_window(pending) <= max(held) + 1


def test_a_long_sequence_needs_window_pages_for_its_window_only():
    blocks = LAYOUT.blocks_for(32_768)
    decode = LAYOUT.pages_for([32_768], [1], 0)
    assert decode <= 1.05 * (blocks + 5 * 512 / 16)
    assert LAYOUT.pages_for([32_768], [32_768], 0) == blocks + 5 * LAYOUT.max_blocks_in_window(4096)


def test_samples_share_the_window_pages_of_the_prompt():
    alone = LAYOUT.pages_for([320], [320], 0)
    both = LAYOUT.pages_for([336, 336], [336, 336], 20)
    assert both == alone + 2 * 6


def test_longest_sequence_of_a_pool():
    for pages in (30, 1000, 5000):
        longest = LAYOUT.max_tokens(pages)
        assert LAYOUT.pages_for([longest], [longest], 0) <= pages < LAYOUT.pages_for([longest + 1], [longest + 1], 0)
