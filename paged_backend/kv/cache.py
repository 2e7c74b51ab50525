"""The memory of the pools: keys, values and states of recurrent layers in pages.

A pool is one tensor of bytes, a row per page. All pages have the same size, so that a freed page can hold anything. A
page has room for `block_size` tokens of some layers of one kind, each at its place:

    layers      0 window, 1 window, 2 full, 3 window, 4 window, 5 full
    full        a page with layers 2, 5
    window      a page with layers 0, 1 and one with layers 3, 4

    page        |----- layer 2 ------|----- layer 5 ------|        or layers 0 and 1, or 3 and 4
    layer       | keys | values | scales of keys | scales of values |

The keys of a layer are a view of the pool, whose stride from block to block is the size of a page. A page is copied to
the host, to a store or to another instance as one piece.

A recurrent layer (Mamba, a gated delta net, a short convolution) stores the same few tensors however long the sequence
is. The tensors of all layers are one after the other in a block, whose pages may be anywhere in the pool. They are read
and written in units, rows of as many bytes as divide a page and every tensor:

    layers      0 conv state, recurrent state    the last inputs of its convolution; the state of its scan
                1 conv state                     a layer that is only a convolution

    block       | 0 conv | 0 recurrent ...... | 1 conv |      bytes
    units       |  0  1  |  2  3  4  5  6  7  |  8  9  |
    pages       |      17      |      4       |   9    |      3 pages of 4 units: unit 4 is the first one of page 4
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.api.block_layout import FULL, BlockLayout, EdgeKind, LayerKind, StateKind, WindowKind
from paged_kernels import packed_blocks
from paged_kernels.cpu.huge_pages import populate_pages, request_huge_pages
from paged_kernels.layer_cache import FORMATS, INT4, LayerCache, plain_channels
from paged_kernels.packed_blocks import PackedBlocks

SCALE = torch.float32
ALIGNMENT = 16  # bytes: of every tensor in a page, and of a page; what a copy kernel moves at a time
STATE_ALIGNMENT = 512  # bytes: of every tensor of a recurrent layer, and then of a page; the least size of a unit

# Maximum share of memory that no layer uses, because the layers of a kind do not fill their pages: in a block of each
# kind together, and in the blocks of any kind. (A long sequence holds most blocks of full attention.)
PADDING_LIMIT, KIND_PADDING_LIMIT = 0.05, 0.2


class TensorShape(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerShape:
    """The shape of the keys and values that one attention layer stores for a token."""

    num_kv_heads: int
    head_dim: int  # elements of a key
    value_dim: int | None = None  # elements of a value; None: head_dim
    latent: bool = False  # whether values are the first elements of keys, and are not stored a second time
    window: int | None = None  # tokens that a query sees; None: all
    batch_invariant: bool = False  # whether a GPU computes the attention of each query by itself
    dtype: torch.dtype | None = None  # of keys and values, if it is another one than that of the cache

    def tensors(self, block_size: int, dtype: torch.dtype) -> list[TensorShape]:
        """Return what a page holds of the layer, in the order of `LayerCache.tensors`. dtype: that of the cache."""
        dtype, value_dim = self.dtype or dtype, self.value_dim or self.head_dim
        if dtype == INT4 and self.num_kv_heads:
            assert block_size == packed_blocks.BLOCK_SIZE and not self.latent
            return [TensorShape(*shape) for shape in PackedBlocks.shapes(self.num_kv_heads, self.head_dim, value_dim)]
        dtype = torch.int8 if dtype == INT4 else dtype  # of a layer without attention
        slots = (self.num_kv_heads, block_size)
        sizes = [self.head_dim] if self.latent else [self.head_dim, value_dim]
        stored = [TensorShape((*slots, size), dtype) for size in sizes]
        return stored + ([TensorShape(slots, SCALE)] * len(sizes) if dtype in FORMATS else [])

    def page_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of the layer in a page."""
        return sum(_aligned(tensor.nbytes) for tensor in self.tensors(block_size, dtype))

    def context_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of the layer that the next token reads of `length` tokens before it."""
        return bytes_per_token([self], dtype) * min(length, self.window or length)

    def edge(self, dtype: torch.dtype) -> LayerShape | None:
        """Return the shape of the layer in the first and the newest block; None if its blocks are not packed. dtype:
        that of the cache."""
        is_packed = (self.dtype or dtype) == INT4 and self.num_kv_heads
        return replace(self, dtype=torch.int8, window=None) if is_packed else None

    def _views(self, memory: Tensor, offset: int, block_size: int, dtype: torch.dtype) -> list[Tensor]:
        views: list[Tensor] = []
        for shape, of_type in self.tensors(block_size, dtype):
            if nbytes := math.prod(shape) * of_type.itemsize:
                part = memory[:, offset : offset + nbytes].view(of_type)
                views.append(part.unflatten(1, shape))
            else:
                views.append(torch.empty((len(memory), *shape), dtype=of_type, device=memory.device))
            offset += _aligned(nbytes)
        return views

    def packed(self, memory: Tensor, offset: int, dtype: torch.dtype) -> PackedBlocks:
        """Return views of the packed blocks of a layer; see `cache`."""
        return PackedBlocks(*self._views(memory, offset, packed_blocks.BLOCK_SIZE, dtype))

    def cache(self, memory: Tensor, offset: int, block_size: int, dtype: torch.dtype) -> LayerCache:
        """Return views of the layer's tensors. memory: [num_pages, page_bytes] uint8. offset: the layer's first byte in
        a page."""
        views = self._views(memory, offset, block_size, dtype)
        if self.latent:
            cache = LayerCache.latent(views[0], self.value_dim or self.head_dim, *views[1:])
        elif len(views) > 2:
            cache = replace(
                LayerCache(*views), key_channels=plain_channels(self.num_kv_heads, self.head_dim, memory.device)
            )
        else:
            cache = LayerCache(*views)
        return replace(cache, batch_invariant=self.batch_invariant)


def unpackable(layer: LayerShape) -> str | None:
    """Return why the blocks of a layer cannot be packed in four bits; None if they can."""
    if layer.latent:
        return "keeps latents, which are not stored in four bits"
    sizes = {"keys": layer.head_dim, "values": layer.value_dim or layer.head_dim}
    odd = [f"{name} of {size} elements" for name, size in sizes.items() if size % packed_blocks.GROUP]
    return f"has {odd[0]}, which is not a multiple of {packed_blocks.GROUP}" if odd else None


NO_ATTENTION = LayerShape(0, 0)  # the shape of a layer that stores no keys and values


def bytes_per_token(layers: Iterable[LayerShape], dtype: torch.dtype) -> int:
    """Return the bytes of a token in all layers: keys, values, and the scales of a quantized `dtype`."""
    size = packed_blocks.BLOCK_SIZE  # the only one with which layers may be packed
    return sum(tensor.nbytes for layer in layers for tensor in layer.tensors(size, dtype)) // size


class CacheSpec(NamedTuple):
    """What a model and its draft model store."""

    layers: tuple[LayerShape, ...]  # for each token
    states: tuple[StateShape, ...]  # for each sequence
    kv_dtype: torch.dtype
    max_model_len: int

    def token_bytes(self, length: int) -> int:
        """Return the bytes that the next token reads of `length` tokens before it."""
        return sum(layer.context_bytes(length, self.kv_dtype) for layer in self.layers)


class Place(NamedTuple):
    """Where a layer is in the blocks of all kinds together."""

    page: int  # counted over the blocks of all kinds
    offset: int  # its first byte in the page


@dataclass(frozen=True)
class CacheLayout:
    """The places of all layers in the pages of a pool."""

    blocks: BlockLayout
    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...]  # of recurrent layers
    dtype: torch.dtype  # a quantized type, or the type of the model's keys and values
    places: tuple[Place, ...]  # of each layer
    edges: tuple[Place | None, ...]  # of each layer in the first and the newest block; None: its blocks are not packed
    page_bytes: int

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of a sequence, in whole pages."""
        return self.blocks.kinds[-1].pages * self.page_bytes if self.states else 0

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerShape],
        block_size: int,
        dtype: torch.dtype,
        *,
        states: Sequence[StateShape] = (),
        max_model_len: int | None = None,
        max_pending: int = 0,
    ) -> CacheLayout:
        """Return the layout for the layers of a model.

        Args:
            layers: shapes and windows of all layers.
            block_size: tokens of a block.
            dtype: the type of the cache.
            states: shapes of the states of recurrent layers.
            max_model_len: maximum tokens of a sequence. Windows this long count as full attention, all if it is None.
            max_pending: maximum tokens of a sequence in steps that are planned but not committed.
        """
        windowed = [
            index
            for index, layer in enumerate(layers)
            if layer.window and max_model_len is not None and layer.window < max_model_len
        ]
        # Layers without attention take no memory, so they are at the first byte of any page.
        empty = [index for index, layer in enumerate(layers) if not layer.page_bytes(block_size, dtype)]
        full = [index for index in range(len(layers)) if index not in windowed and index not in empty]
        edges = {index: shape for index, layer in enumerate(layers) if (shape := layer.edge(dtype))}
        window = max((layers[index].window or 0 for index in windowed), default=1)
        kinds: list[tuple[LayerKind, dict[int, LayerShape]]] = [
            (FULL, {index: layers[index] for index in full}),
            (WindowKind(window=window), {index: layers[index] for index in windowed}),
            (EdgeKind(), edges),
        ]
        kinds = [(kind, shapes) for kind, shapes in kinds if shapes]
        sizes = [[shape.page_bytes(block_size, dtype) for shape in shapes.values()] for _, shapes in kinds]
        page_bytes, state_bytes = _page_bytes(sizes), sum(map(_state_bytes, _tensors_of(states)))
        if states:  # without attention, a page is a state
            page_bytes = _state_bytes(page_bytes) if kinds else state_bytes
        places: list[dict[int, Place]] = []  # by kind
        of_tokens: list[LayerKind] = []
        first = 0  # page of a kind
        for (kind, shapes), of_kind in zip(kinds, sizes, strict=True):
            packed = [Place(first + page, offset) for page, offset in _packed(of_kind, page_bytes)]
            places.append(dict(zip(shapes, packed, strict=True)))
            of_tokens.append(replace(kind, pages=packed[-1].page + 1 - first))
            first += of_tokens[-1].pages
        recurrent = (StateKind(-(-state_bytes // page_bytes)),) if states else ()
        limit = 0 if all(kind.keeps_all for kind in of_tokens) else max_pending
        blocks = BlockLayout(block_size, (*(of_tokens or [LayerKind(0)]), *recurrent), limit)
        of_edges = places.pop() if edges else {}
        found = dict.fromkeys(empty, Place(0, 0)) | {index: place for kind in places for index, place in kind.items()}
        ordered = tuple(found[index] for index in range(len(layers)))
        ordered_edges = tuple(of_edges.get(index) for index in range(len(layers)))
        return cls(blocks, tuple(layers), tuple(states), dtype, ordered, ordered_edges, page_bytes)


def _packed(sizes: Sequence[int], page_bytes: int) -> list[tuple[int, int]]:
    """Return the page and the first byte of layers of these sizes, which fill pages in their order. Stores keep pages
    as they are: another order needs another FORMAT_VERSION (stores/block_file.py)."""
    places: list[tuple[int, int]] = []
    page = used = 0
    for size in sizes:
        if used + size > page_bytes:
            page, used = page + 1, 0
        places.append((page, used))
        used += size
    return places


def _page_bytes(kinds: Sequence[Sequence[int]]) -> int:
    """Return the largest size of a page within the limits of padding; the one with least padding if there is none.

    kinds: the sizes of the layers of each kind. A page has room for the first layers of a kind, and for any layer.
    """
    total = sum(map(sum, kinds))
    if len(kinds) < 2:
        return total
    largest = max(map(max, kinds))
    candidates = sorted({size for kind in kinds for size in accumulate(kind) if size >= largest}, reverse=True)

    def held(kind: Sequence[int], size: int) -> int:
        return (_packed(kind, size)[-1][0] + 1) * size

    def padding(size: int) -> float:
        return sum(held(kind, size) for kind in kinds) / total - 1

    for size in candidates:
        if padding(size) <= PADDING_LIMIT and all(
            held(kind, size) <= (1 + KIND_PADDING_LIMIT) * sum(kind) for kind in kinds
        ):
            return size
    return min(candidates, key=padding)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _state_bytes(size: TensorShape | int) -> int:
    """Return the bytes that a tensor of a recurrent layer takes in a block, or of which a page with states consists."""
    nbytes = size if isinstance(size, int) else size.nbytes
    return -(-nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


class LayerPages(NamedTuple):
    """The pages that hold a layer, counted over the blocks of all kinds."""

    cache: int
    packed: int | None = None  # of its packed blocks; None: it has none


@dataclass(frozen=True, eq=False)
class KVCache:
    """The keys and values of every layer, in pages; see `CacheLayout`. With one kind of layer a block is one page, and
    one block table serves the whole model."""

    memory: Tensor  # [num_pages, page_bytes] uint8
    layers: tuple[LayerCache, ...]  # views of the memory; the tensors of a layer without attention are empty
    pages: tuple[LayerPages, ...]  # of each layer
    states: StateCache | None = None  # None: the model has no recurrent layers

    @classmethod
    def allocate(cls, layout: CacheLayout, num_pages: int, device: torch.device, *, pinned: bool = False) -> KVCache:
        """Return a cache filled with zeros. Unless all blocks are single pages that are kept, it has one more page,
        which stays zero and stands for NULL in block tables. pinned: whether to allocate host memory that a GPU can
        access directly."""
        num_pages += layout.blocks.has_null
        size = num_pages * layout.page_bytes
        memory = (pinned_zeros(size) if pinned else _zeros(size, device)).view(num_pages, layout.page_bytes)
        caches, pages, block_size = [], [], layout.blocks.block_size
        for layer, place, edge in zip(layout.layers, layout.places, layout.edges, strict=True):
            if (shape := layer.edge(layout.dtype)) and edge:
                cache = shape.cache(memory, edge.offset, block_size, layout.dtype)
                caches.append(replace(cache, packed=layer.packed(memory, place.offset, layout.dtype)))
                pages.append(LayerPages(edge.page, place.page))
            else:
                caches.append(layer.cache(memory, place.offset, block_size, layout.dtype))
                pages.append(LayerPages(place.page))
        states = StateCache.of(layout.states, memory) if layout.states else None
        return cls(memory, tuple(caches), tuple(pages), states)

    @property
    def device(self) -> torch.device:
        """The device of the memory."""
        return self.memory.device

    @property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        return self.memory.shape[1]

    def populate(self, threads: int) -> None:
        """Make the system provide the pages of a CPU's memory, on several threads.

        Without it, the first write to a page waits until the system has cleared the page: a sixth of the time of a
        prefill (2 cores of an AMD EPYC, Zen 5, in a virtual machine).
        """
        populate_pages(self.memory, threads)

    def layer_range(self, start: int, end: int) -> KVCache:
        """Return a view of some of the layers, in the same memory."""
        return KVCache(self.memory, self.layers[start:end], self.pages[start:end])

    @property
    def pages_per_block(self) -> int:
        """The number of pages of a block, in all kinds of layers."""
        return 1 + max((page for pages in self.pages for page in pages if page is not None), default=0)

    def read(self, pages: Sequence[int]) -> Tensor:
        """Return a copy of pages on the host, [len(pages), page_bytes] uint8."""
        return self.memory.index_select(0, torch.tensor(pages, dtype=torch.int64, device=self.device)).cpu()

    def write(self, pages: Sequence[int], content: Tensor) -> None:
        """Overwrite pages with what `read` returned."""
        if self.device.type != "cpu":
            self.memory.index_copy_(0, torch.tensor(pages, device=self.device), content.to(self.device))
            return
        for page, of_page in zip(pages, content, strict=True):  # several times as fast as an indexed copy of bytes
            self.memory[page].copy_(of_page)


def pinned_zeros(nbytes: int) -> Tensor:
    """Return zeros in pinned memory. A pool is a single pinned allocation: PyTorch rounds each allocation up to a power
    of two, so one per tensor could take twice the memory."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_()


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    """Return zeros. Attention multiplies slots that were never written by a weight of 0, and NaN would survive that. On
    a CPU, NumPy's zeros come from calloc: the system provides the memory in `KVCache.populate`, or when a block is
    first used."""
    if device.type != "cpu" or not nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    zeros = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    request_huge_pages(zeros)
    return zeros


@dataclass(frozen=True)
class StateShape:
    """The states that one recurrent layer keeps for a sequence."""

    conv: TensorShape  # [channels, kernel_size]: the last inputs of the convolution
    recurrent: TensorShape | None  # None: the layer is only a convolution


def _tensors_of(layers: Iterable[StateShape]) -> list[TensorShape]:
    return [part for layer in layers for part in (layer.conv, layer.recurrent) if part]


def state_nbytes(layers: Iterable[StateShape]) -> int:
    """Return the bytes that recurrent layers keep for a sequence."""
    return sum(shape.nbytes for shape in _tensors_of(layers))


@dataclass(frozen=True, eq=False)
class StateTensor:
    """A tensor of a recurrent layer, in every block with states."""

    shape: TensorShape
    span: slice  # its units in a block
    pool: Tensor  # all units of the pool, [num_units, elements]

    def read(self, units: Tensor) -> Tensor:
        """Return a copy of the tensor of several blocks, [num_blocks, *shape]. units: see `StateCache.units_of`."""
        rows = self.pool.index_select(0, self._of(units))
        if self._padding:
            rows = rows.view(len(units), -1)[:, : -self._padding].contiguous()
        return rows.view(-1, *self.shape.shape)

    def write(self, units: Tensor, values: Tensor) -> None:
        """Overwrite the tensor of several blocks. values: what `read` returned, or changed in place."""
        if self._padding:
            values = pad(values.flatten(1), (0, self._padding))
        self.pool.index_copy_(0, self._of(units), values.reshape(-1, self.pool.shape[1]))

    def _of(self, units: Tensor) -> Tensor:
        return units[:, self.span].reshape(-1)

    @cached_property
    def _padding(self) -> int:
        """Elements of its last unit that it does not use."""
        return -math.prod(self.shape.shape) % self.pool.shape[1]


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one recurrent layer."""

    conv: StateTensor
    recurrent: StateTensor | None


@dataclass(frozen=True, eq=False)
class StateCache:
    """The states of every recurrent layer, in the pages of a pool."""

    layers: tuple[LayerState, ...]  # in the order of the model's recurrent layers
    places: Tensor  # [2, num_units] int64: the page of each unit of a block, counted from 0, and its place in the page
    units_per_page: int

    @classmethod
    def of(cls, layers: Sequence[StateShape], memory: Tensor) -> StateCache:
        """Return views of a pool, [num_pages, page_bytes] uint8."""
        sizes = [_state_bytes(shape) for shape in _tensors_of(layers)]
        unit = math.gcd(memory.shape[1], *sizes)
        starts, pool = iter([0, *accumulate(sizes)]), memory.view(-1, unit)

        def tensor(shape: TensorShape) -> StateTensor:
            start = next(starts)
            span = slice(start // unit, (start + _state_bytes(shape)) // unit)
            return StateTensor(shape, span, pool.view(shape.dtype))

        states = [
            LayerState(tensor(layer.conv), tensor(layer.recurrent) if layer.recurrent else None) for layer in layers
        ]
        per_page = memory.shape[1] // unit
        units = torch.arange(sum(sizes) // unit, device=memory.device)
        return cls(tuple(states), torch.stack((units // per_page, units % per_page)), per_page)

    @property
    def pages_per_block(self) -> int:
        """The number of pages of a block."""
        return -(-self.places.shape[1] // self.units_per_page)

    def units_of(self, pages: Tensor) -> Tensor:
        """Return the units of several blocks, [num_blocks, num_units] int64. pages: their pages, [num_blocks, pages of
        a block] int64."""
        return pages[:, self.places[0]] * self.units_per_page + self.places[1]
