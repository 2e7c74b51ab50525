"""The places of layers in the pages of a block."""

import pytest
import torch

from paged_backend.api import block_layout
from paged_backend.api.block_layout import LayerKind, WindowKind
from paged_backend.kv.cache import KVCache, LayerShape
from paged_backend.kv.cache_layout import PADDING_LIMIT, CacheLayout

FULL, WINDOW = LayerShape(2, 16), LayerShape(2, 16, window=512)


def layout_of(*layers, max_model_len=8192):
    return CacheLayout.of(layers, 16, max_model_len=max_model_len, max_pending=4096)


def test_layers_without_windows_are_in_one_page():
    layout = layout_of(FULL, LayerShape(4, 8), FULL)
    assert layout.blocks.kinds == (block_layout.FULL,)
    assert layout.places == ((0, 0), (0, 1), (0, 2))


@pytest.mark.parametrize(
    ("full", "windowed", "pages"),
    [(3, 15, (1, 5)), (4, 22, (2, 11)), (5, 29, (1, 6)), (10, 52, (2, 11)), (12, 12, (1, 1)), (0, 32, (0, 1))],
    ids=["Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B", "Gemma 3 27B", "gpt-oss 20B", "Mistral 7B v0.1"],
)
def test_pages_of_known_models(full, windowed, pages):
    layout = layout_of(*[FULL] * full, *[WINDOW] * windowed)
    kinds = [kind for kind in (LayerKind(pages[0]), WindowKind(pages[1], 512)) if kind.pages]
    assert list(layout.blocks.kinds) == kinds
    assert layout.blocks.pages * len(layout.shapes) <= (full + windowed) * (1 + PADDING_LIMIT)
    assert len(set(layout.places)) == full + windowed
    base = [page < pages[0] for page, _ in layout.places]
    assert base == [True] * full + [False] * windowed


def test_windows_that_no_sequence_exceeds_are_none():
    assert layout_of(FULL, WINDOW, max_model_len=512).blocks.kinds == (block_layout.FULL,)


def test_layers_of_different_shapes_keep_all_blocks(caplog):
    caplog.set_level("INFO", "paged_llm")
    assert layout_of(FULL, LayerShape(2, 32, window=512)).blocks.kinds == (block_layout.FULL,)
    assert "different shapes" in caplog.text


def windowed_cache():
    """Return a cache of 7 pages for three layers, the middle one with full attention."""
    layout = layout_of(WINDOW, FULL, WINDOW)
    return KVCache.allocate(
        layout.shapes,
        num_pages=7,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        places=layout.places,
    )


def test_layers_in_different_pages_share_tensors():
    kv = windowed_cache()
    assert kv.layers[0] is kv.layers[1] is kv.layers[2]
    assert [kv.page_of(layer) for layer in range(3)] == [1, 0, 2]
    assert [len(tensor) for tensor in kv.tensors] == [8, 8]  # and the null page


def test_blocks_are_read_and_written_page_by_page():
    kv = windowed_cache()
    for tensor in kv.tensors:
        tensor.copy_(torch.randn_like(tensor))
    content = kv.read_block([3, 5])
    kv.write_block([0, 1], content)
    for tensor in kv.tensors:
        assert tensor[0].equal(tensor[3]) and tensor[1].equal(tensor[5])
