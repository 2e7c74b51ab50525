"""The places of layers in the pages of a block."""

from itertools import pairwise

import pytest
import torch

from paged_backend.api import block_layout
from paged_backend.api.block_layout import EdgeKind, LayerKind, StateKind, WindowKind
from paged_backend.kv.cache import (
    PADDING_LIMIT,
    CacheLayout,
    KVCache,
    LayerShape,
    StateShape,
    TensorShape,
    bytes_per_token,
    state_nbytes,
    unpackable,
)
from paged_kernels.layer_cache import INT4

FULL, WINDOW = LayerShape(2, 16), LayerShape(2, 16, window=512)
PAGE = 2 * 2 * 16 * 16 * 4  # bytes of one of these layers: keys and values, heads, tokens, elements, bytes


def layout_of(*layers, max_model_len=8192):
    return CacheLayout.of(layers, 16, torch.float32, max_model_len=max_model_len, max_pending=4096)


def test_layers_without_windows_are_in_one_page():
    layout = layout_of(FULL, LayerShape(4, 8), FULL)
    assert layout.blocks.kinds == (block_layout.FULL,)
    assert layout.places == ((0, 0), (0, PAGE), (0, 2 * PAGE))
    assert layout.page_bytes == 3 * PAGE


@pytest.mark.parametrize(
    ("full", "windowed", "pages"),
    [(3, 15, (1, 5)), (4, 22, (2, 11)), (5, 29, (1, 6)), (10, 52, (2, 11)), (12, 12, (1, 1)), (0, 32, (0, 1))],
    ids=["Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B", "Gemma 3 27B", "gpt-oss 20B", "Mistral 7B v0.1"],
)
def test_pages_of_known_models(full, windowed, pages):
    layout = layout_of(*[FULL] * full, *[WINDOW] * windowed)
    kinds = [kind for kind in (LayerKind(pages[0]), WindowKind(pages[1], 512)) if kind.pages]
    assert list(layout.blocks.kinds) == kinds
    assert layout.blocks.pages * layout.page_bytes <= (full + windowed) * PAGE * (1 + PADDING_LIMIT)
    assert len(set(layout.places)) == full + windowed
    base = [page < pages[0] for page, _ in layout.places]
    assert base == [True] * full + [False] * windowed


def test_windows_that_no_sequence_exceeds_are_none():
    assert layout_of(FULL, WINDOW, max_model_len=512).blocks.kinds == (block_layout.FULL,)


@pytest.mark.parametrize(
    ("full", "windowed", "pages"),
    [
        ([LayerShape(2, 32)] * 2, [WINDOW] * 4, (1, 1)),  # twice as large, half as many
        ([LayerShape(2, 32)] * 2, [WINDOW] * 10, (2, 5)),
        ([LayerShape(4, 16, 8)] * 2, [WINDOW] * 6, (1, 2)),  # 1.5 times as large
    ],
)
def test_layers_of_different_shapes_share_pages(full, windowed, pages):
    layout = layout_of(*full, *windowed)
    assert [kind.pages for kind in layout.blocks.kinds] == list(pages)
    sizes = [layer.page_bytes(16, torch.float32) for layer in layout.layers]
    assert layout.blocks.pages * layout.page_bytes <= sum(sizes) * (1 + PADDING_LIMIT)
    ends = [(page, offset + size) for (page, offset), size in zip(layout.places, sizes, strict=True)]
    assert all(end <= layout.page_bytes for _, end in ends)
    starts = sorted(zip(layout.places, ends, strict=True))
    assert all(end <= start for (_, end), (start, _) in pairwise(starts)), "layers overlap"


def test_sizes_that_do_not_fit_together_leave_as_little_as_possible_unused():
    """Two layers of 3 units and one of 5: of pages of 3, 5 and 6 units, those of 6 leave 1 of 12 unused."""
    layers = LayerShape(3, 16), LayerShape(3, 16), LayerShape(5, 16, window=512)
    layout = layout_of(*layers)
    assert [kind.pages for kind in layout.blocks.kinds] == [1, 1]
    assert layout.page_bytes == 3 * PAGE


def windowed_cache():
    """Return a cache of 7 pages for three layers, the middle one with full attention."""
    return KVCache.allocate(layout_of(WINDOW, FULL, WINDOW), 7, torch.device("cpu"))


def test_layers_in_different_pages_have_the_same_place():
    kv = windowed_cache()
    assert {layer.keys.data_ptr() for layer in kv.layers} == {kv.memory.data_ptr()}
    assert [pages.cache for pages in kv.pages] == [1, 0, 2]
    assert len(kv.memory) == 8  # and the null page


def test_tensors_of_layers_do_not_overlap():
    """Each of them has its own bytes of every page, with a quantized type too."""
    layers = LayerShape(2, 8), LayerShape(1, 12, 4), LayerShape(3, 4), LayerShape(1, 12, 8, latent=True)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        kv = KVCache.allocate(CacheLayout.of(layers, 4, dtype), 3, torch.device("cpu"))
        tensors = [tensor for layer in kv.layers for tensor in layer.tensors]
        for value, tensor in enumerate(tensors, 1):
            assert not tensor.any()
            tensor.fill_(value)
        assert [tensor.float().unique().tolist() for tensor in tensors] == [[n] for n in range(1, 1 + len(tensors))]
        used = sum(tensor.nbytes for tensor in tensors)
        assert used <= kv.memory.nbytes <= used + 3 * 16 * len(tensors)


def test_blocks_are_read_and_written_page_by_page():
    kv = windowed_cache()
    kv.memory.copy_(torch.randint(256, kv.memory.shape))
    kv.write([0, 1], kv.read([3, 5]))
    assert kv.memory[0].equal(kv.memory[3]) and kv.memory[1].equal(kv.memory[5])


# --- packed blocks ----------------------------------------------------------------------------------------------------


def test_packed_layers_share_pages_with_their_edges():
    """Qwen2.5-0.5B: 72 bytes for the keys and values of a token and head, as 8 bits take 136."""
    layers = [LayerShape(2, 64)] * 24
    layout = CacheLayout.of(layers, 32, INT4, max_model_len=8192, max_pending=4096)
    assert layout.blocks.kinds == (block_layout.FULL, EdgeKind(2))
    assert layout.page_bytes == 24 * 2 * 32 * 72
    assert bytes_per_token(layers, INT4) == 24 * 2 * 72
    assert layout.blocks.pages_for([2048], [1], 0) == 64 + 2 * 2
    assert layout.blocks.max_pending == 4096


def test_windows_and_skipped_layers_beside_packed_ones():
    """Each kind of the windows keeps its blocks. A layer with its own type is not packed."""
    layers = [
        LayerShape(2, 32),
        LayerShape(2, 32, window=512),
        LayerShape(2, 32, dtype=torch.float32),
        LayerShape(0, 0),
    ]
    layout = CacheLayout.of(layers, 32, INT4, max_model_len=8192)
    assert [type(kind) for kind in layout.blocks.kinds] == [LayerKind, WindowKind, EdgeKind]
    assert [place is not None for place in layout.edges] == [True, True, False, False]
    kv = KVCache.allocate(layout, 3 * layout.blocks.pages, torch.device("cpu"))
    assert [cache.packed is not None for cache in kv.layers] == [True, True, False, False]
    assert [cache.format for cache in kv.layers[:3]] == ["int8", "int8", None]
    held = []  # the part of each tensor in one block of all kinds
    for cache, pages in zip(kv.layers[:3], kv.pages, strict=False):
        held += [tensor[pages.cache] for tensor in cache.tensors]
        held += [tensor[pages.packed] for tensor in cache.packed.tensors] if cache.packed else []
    for value, tensor in enumerate(held, 1):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in held] == [[value] for value in range(1, 1 + len(held))]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (LayerShape(1, 576, 512, latent=True), "keeps latents"),
        (LayerShape(2, 80), "has keys of 80 elements, which is not a multiple of 32"),
        (LayerShape(2, 64, 48), "has values of 48 elements"),
        (LayerShape(2, 96, 64), None),
        (LayerShape(0, 0), None),
    ],
)
def test_layers_that_cannot_be_packed(layer, reason):
    found = unpackable(layer)
    assert found is None if reason is None else found.startswith(reason)


# --- states of recurrent layers ---------------------------------------------------------------------------------------

CONV, SCAN = TensorShape((6, 4), torch.bfloat16), TensorShape((2, 40, 5), torch.float32)  # 48 and 1600 bytes
STATES = [StateShape(CONV, SCAN), StateShape(TensorShape((128, 4), torch.float32), None)]


def test_a_state_is_a_block_of_as_many_pages_as_it_needs():
    """Of the pages of the layers with attention, whose size is a multiple of 512 bytes, as every tensor is."""
    layout = CacheLayout.of([LayerShape(1, 30), LayerShape(0, 0)], 4, torch.float32, states=STATES)
    assert layout.page_bytes == 1024  # 960 of keys and values
    assert layout.blocks.kinds == (block_layout.FULL, StateKind(5))  # 512 + 2048 + 2048 bytes
    assert layout.state_bytes == 5 * 1024
    assert state_nbytes(STATES) == 48 + 1600 + 2048


def test_without_attention_a_page_is_a_state():
    layout = CacheLayout.of([LayerShape(0, 0)], 4, torch.float32, states=STATES)
    assert layout.blocks.kinds == (LayerKind(0), StateKind(1))
    assert layout.page_bytes == layout.state_bytes == 512 + 2048 + 2048


def test_windows_share_pages_with_states():
    layout = CacheLayout.of([FULL, WINDOW, WINDOW], 16, torch.float32, states=STATES, max_model_len=8192)
    assert [type(kind) for kind in layout.blocks.kinds] == [LayerKind, WindowKind, StateKind]


@pytest.mark.parametrize("layers", [[LayerShape(1, 30)], [LayerShape(1, 16)] * 12, []], ids=["small", "large", "none"])
def test_states_are_read_and_written_in_any_pages(layers):
    """Each tensor is in its own bytes, which other blocks and keys and values do not share."""
    layout = CacheLayout.of(layers, 4, torch.float32, states=STATES)
    count = layout.blocks.kinds[-1].pages
    kv = KVCache.allocate(layout, 7 * count, torch.device("cpu"))
    kv.memory.fill_(7)
    pages = torch.randperm(7 * count)[: 3 * count].view(3, count)
    units = kv.states.units_of(pages)
    tensors = [part for layer in kv.states.layers for part in (layer.conv, layer.recurrent) if part]
    values = [torch.randn(3, *part.shape.shape).to(part.shape.dtype) for part in tensors]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.write(units, value)
    for order in ([0, 1, 2], [2, 0], [1]):
        for tensor, value in zip(tensors, values, strict=True):
            found = tensor.read(units[order])
            assert torch.equal(found, value[order]) and found.is_contiguous()
    others = sorted(set(range(7 * count)) - set(pages.flatten().tolist()))
    assert (kv.memory[others] == 7).all()
    assert kv.states.pages_per_block == count
    copied = [page for page in others if page not in pages][:count]
    kv.write(copied, kv.read(pages[1].tolist()))  # as a whole
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor.read(kv.states.units_of(torch.tensor([copied]))), value[1:2])


def test_units_are_as_large_as_the_sizes_allow():
    """Few long rows are copied faster than many short ones."""
    states = [StateShape(TensorShape((4096,), torch.float32), TensorShape((2, 4096), torch.float32))]
    layout = CacheLayout.of([LayerShape(8, 64)], 16, torch.float32, states=states)
    kv = KVCache.allocate(layout, 4, torch.device("cpu"))
    assert kv.states.units_of(torch.tensor([[0]])).shape == (1, 3)
