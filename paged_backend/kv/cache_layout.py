"""Which page of a block, and which tensors of the pool, hold the keys and values of each layer.

All pages of a pool have the same size, so that a freed page can hold anything. A page has room for some number of
layers of one kind:

    layers      0 window, 1 window, 2 full, 3 window, 4 window, 5 full
    full        a page with layers 2, 5
    window      a page with layers 0, 1 and one with layers 3, 4
    tensors     one for layers 2, 0 and 3, another for layers 5, 1 and 4
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from paged_backend.api.block_layout import BlockLayout, LayerKind, WindowKind
from paged_backend.kv.cache import LayerShape, StateShape

log = logging.getLogger("paged_llm")

# Maximum share of a block that no layer uses, because the layers of a kind do not fill their pages.
PADDING_LIMIT = 0.05


class CacheSpec(NamedTuple):
    """What a model and its draft model store."""

    layers: tuple[LayerShape, ...]  # for each token
    states: tuple[StateShape, ...]  # for each sequence
    kv_dtype: torch.dtype
    max_model_len: int


@dataclass(frozen=True)
class CacheLayout:
    """The places of all layers in the pool."""

    blocks: BlockLayout
    shapes: tuple[LayerShape, ...]  # shapes of the layers that a page has room for
    # For each layer: its page, counted over the blocks of all kinds, and the index of its tensors.
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerShape], block_size: int, *, max_model_len: int, max_pending: int) -> CacheLayout:
        """Return the layout for the layers of a model.

        Args:
            layers: shapes and windows of all layers.
            block_size: tokens of a block.
            max_model_len: maximum tokens of a sequence. Windows this long count as full attention.
            max_pending: maximum tokens of a sequence in steps that are planned but not committed.
        """
        windowed = [index for index, layer in enumerate(layers) if layer.window and layer.window < max_model_len]
        if windowed and len({replace(layer, window=None) for layer in layers}) > 1:
            log.info("blocks outside of sliding windows are not freed, because the layers have different shapes")
            windowed = []
        if not windowed:
            places = tuple((0, index) for index in range(len(layers)))
            return cls(BlockLayout(block_size), tuple(layers), places)
        full = [index for index in range(len(layers)) if index not in windowed]
        size = _layers_per_page(len(full), len(windowed))
        full_pages, window_pages = -(-len(full) // size), -(-len(windowed) // size)
        placed = {layer: (index // size, index % size) for index, layer in enumerate(full)}
        placed |= {layer: (full_pages + index // size, index % size) for index, layer in enumerate(windowed)}
        window = max(layers[index].window or 0 for index in windowed)
        kinds = (LayerKind(full_pages), WindowKind(window_pages, window))
        blocks = BlockLayout(block_size, kinds if full else kinds[1:], max_pending)
        return cls(blocks, tuple(layers[:size]), tuple(placed[index] for index in range(len(layers))))


def _layers_per_page(full: int, windowed: int) -> int:
    """Return the largest number of layers in a page with which at most PADDING_LIMIT of a block is unused."""
    layers = full + windowed
    for size in range(min(full, windowed) or layers, 0, -1):
        if (-(-full // size) + -(-windowed // size)) * size <= layers * (1 + PADDING_LIMIT):
            return size
    return 1
