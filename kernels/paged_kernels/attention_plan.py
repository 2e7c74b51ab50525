"""The plan of an attention call: its tiles, splits and grids, and the constants and arguments of its kernels.

A plan depends only on what the host knows about a step, so the layers of a step with the same shapes share it. Tiles
come from `launch_table`, the number of splits from the batch and the device. Imports no triton.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_kernels.launch import OPTIONS, Device, Launch, zeros
from paged_kernels.launch_table import HOPPER, PRODUCER_TILES, Tile, TuningKey, decode_tile, find_tile, power_of_two
from paged_kernels.layer_cache import CacheLayout, LayerCache, as_bytes
from paged_kernels.packed_blocks import BLOCK_SIZE, PackedBlocks
from paged_kernels.paging import Paging

MIN_SPLIT = 256  # minimum keys of a split; starting and merging a shorter one costs more than it saves
SHORTEST_SPLIT = 64  # the same in a launch with few programs, which would leave most multiprocessors without work
MAX_SPLITS = 64  # maximum splits of a sequence, which the merge reads at once
MAX_WORKSPACE = 64 << 20  # maximum bytes of the results of splits of chunks, or of partitions
MAX_SPLIT_LEN = 16384  # maximum keys of a split, so that no program computes a long sequence alone
WIDEST_SINGLE = 256  # elements of the widest key that is padded to a power of two
MIN_RELATIVE_OCCUPANCY = 0.9  # share of the best occupancy that the number of splits must reach
LOG2E = 1.4426950408889634
MIN_COPIED_ROWS = 16  # minimum block size with a producer, whose registers hold the numbers of a step's blocks
ALIGNED_ELEMENTS = 8  # elements of 16 bits in 16 bytes, at whose multiples copied rows begin
ALIGNED = 4  # floats in 16 bytes: Triton compiles another variant for a pointer without this alignment


class Choice(NamedTuple):
    """The decisions on the attention of a step that depend on the sizes of the whole step, not only on its longest
    chunk."""

    splits: int  # splits of each sequence's keys, which are merged if there are several
    small_tiles: bool  # whether large tiles would occupy too few multiprocessors


CHOICES = tuple(Choice(splits, small_tiles) for splits in (1, 2) for small_tiles in (False, True))


class _Thread(threading.local):
    forced: Choice | None = None


_thread = _Thread()


@contextmanager
def force(choice: Choice) -> Iterator[None]:
    """Make the plans of this thread's launches follow `choice` instead of the sizes of the step, so that each is
    compiled."""
    previous, _thread.forced = _thread.forced, choice
    try:
        yield
    finally:
        _thread.forced = previous


# --- tiles and splits -------------------------------------------------------------------------------------------------


class LaunchShape(NamedTuple):
    """The tiles of a launch."""

    heads: int  # query heads of a group in one tile
    small: Tile  # holds all queries of a sequence
    large: Tile | None  # holds a part of a longer chunk; None if the step has no longer chunk


def max_small_rows(itemsize: int, block_d: int) -> int:
    """Return the maximum rows of a small tile. fp32 is multiplied in registers; wide rows would not fit them either."""
    return 16 if itemsize == 4 or block_d > WIDEST_SINGLE else 64


def heads_per_tile(group: int, itemsize: int, block_d: int) -> int:
    """Return how many query heads of a group one tile takes."""
    return min(group, max_small_rows(itemsize, block_d))


def rows_of_query(group: int, itemsize: int, block_d: int) -> int:
    """Return the rows of a tile that one query takes, at least the 16 of a tensor core instruction."""
    return max(16, power_of_two(heads_per_tile(group, itemsize, block_d)))


def padded_head_dim(head_dim: int) -> int:
    """Return the head dimension of a tile, at least the 16 of a tensor core instruction."""
    return max(16, power_of_two(head_dim))


def key_blocks(head_dim: int) -> tuple[int, int]:
    """Return the sizes of the two parts in which a tile holds keys; the second is 0 if there is one part.

    Padding 576 elements to a power of two would take almost twice the memory and the arithmetic, so that keys of more
    than 256 elements are split: 576 into 512 and 64.
    """
    if head_dim <= WIDEST_SINGLE:
        return padded_head_dim(head_dim), 0
    first = 1 << (head_dim.bit_length() - 1)
    return first, padded_head_dim(head_dim - first) if head_dim > first else 0


def launch_shape(
    *,
    chip: str,
    head_dim: int,
    itemsize: int,
    group: int,
    quantized: bool,
    num_kv_heads: int,
    num_tokens: int,
    max_query_len: int,
    multiprocessors: int,
    producer: bool = False,
    always: bool = False,
) -> LaunchShape:
    """Choose the tiles of a step: small ones only if one holds every query of a sequence, else small and large ones.

    A decode row in a launch with large tiles keeps its small tile: in a tile of 128 rows it would compute 32 times as
    much as necessary. Its program still takes the registers and shared memory of the large tile's code, unless the
    large tiles have a launch of their own, with a producer.

    producer: whether the layer's large tiles may have a producer. always: whether they have one then, whatever the
    table says.
    """
    block_d = key_blocks(head_dim)[0]
    heads, rows = heads_per_tile(group, itemsize, block_d), rows_of_query(group, itemsize, block_d)
    one_tile = max_query_len * heads <= max_small_rows(itemsize, block_d)
    if one_tile:
        rows = max(rows, power_of_two(max_query_len * heads))
    small = decode_tile(chip, block_d=block_d, itemsize=itemsize, rows=rows, quantized=quantized)
    if one_tile:
        return LaunchShape(heads, small, None)

    def tile(length: int, *, producer: bool = False) -> Tile:
        if producer and always:
            return PRODUCER_TILES[block_d]
        key = TuningKey(block_d, itemsize, rows, quantized, power_of_two(length))
        tuned = find_tile(chip, key, producer=producer)
        return tuned._replace(block_m=max(rows, tuned.block_m))

    large = tile(max_query_len, producer=producer)
    programs = (num_tokens * heads // large.block_m + 1) * num_kv_heads * -(-group // heads)
    too_few = _thread.forced.small_tiles if _thread.forced else programs < multiprocessors
    if large.block_m > 64 >= rows and too_few:  # halves the rows per tile, doubles the programs
        large = tile(1)._replace(block_m=64)
    return LaunchShape(heads, small, large)


def prefix_tile(*, chip: str, head_dim: int, itemsize: int, group: int, quantized: bool, num_seqs: int) -> Tile:
    """Choose the tile of the shared-prefix pass: a prefill tile whose rows are decode rows of several sequences."""
    block_d = key_blocks(head_dim)[0]
    heads, rows = heads_per_tile(group, itemsize, block_d), rows_of_query(group, itemsize, block_d)
    length = 4096 if num_seqs * heads > 64 else 1  # tokens of a chunk that fills as many rows, or one tile of 64
    tile = find_tile(chip, TuningKey(block_d, itemsize, rows, quantized, length))
    smaller = max(rows, min(tile.block_m, power_of_two(num_seqs * heads)))
    return tile._replace(block_m=max(smaller, 64 if tile.block_m >= 64 else 16))


def min_split_of(programs: int, multiprocessors: int) -> int:
    """Return the minimum keys of a split in a launch with this number of programs without splits."""
    return MIN_SPLIT if 2 * programs > multiprocessors else min(MIN_SPLIT, SHORTEST_SPLIT)


def count_splits(programs: int, max_len: int, multiprocessors: int) -> int:
    """Return the maximum number of splits of each sequence's keys in a launch (Flash-Decoding, Dao et al. 2023).

    On the device, a program takes its share of its own sequence's length.

    Args:
        programs: programs of the launch with one split per sequence.
        max_len: length of the longest sequence. It is rounded up to a power of two, so that similar steps, and all
            steps of a captured CUDA graph, have the same number of splits.
        multiprocessors: multiprocessors of the device.

    With s splits the busiest multiprocessor runs ceil(programs * s / multiprocessors) splits of length 1/s, so the
    occupancy is programs * s / multiprocessors divided by that: for 136 programs on 132 multiprocessors it is 0.52
    with one split and 0.88 with six. The result is the smallest number within a tenth of the best occupancy.
    """
    if _thread.forced:
        return _thread.forced.splits
    most = min(MAX_SPLITS, power_of_two(max_len) // min_split_of(programs, multiprocessors))
    if most <= 1 or programs <= 0:
        return 1

    def occupancy(splits: int) -> float:
        work = programs * splits
        return work / (multiprocessors * -(-work // multiprocessors))

    # Eight programs per multiprocessor balance the load; more splits would only add empty programs.
    balanced = min(most, -(-power_of_two(max_len) // MAX_SPLIT_LEN), max(1, 8 * multiprocessors // programs))
    enough = MIN_RELATIVE_OCCUPANCY * max(occupancy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if splits >= balanced and occupancy(splits) >= enough)


# --- constants and arguments of the kernels ---------------------------------------------------------------------------


class LayerKey(NamedTuple):
    """The properties of a layer that decide how its attention is launched. A `paging.PlanKey`."""

    planner: Callable[[Any, Paging], "AttentionPlan"]  # from the key itself and the addresses of a step
    device: Device
    num_tokens: int
    num_heads: int
    head_dim: int  # of keys and queries
    value_dim: int
    num_kv_heads: int
    dtype: torch.dtype  # data type of queries
    query_strides: tuple[int, int]  # strides from token to token and from head to head
    cache: CacheLayout
    shares_memory: bool  # whether values are the first elements of keys
    sliding_window: int | None
    has_softcap: bool
    has_sinks: bool

    def plan(self, paging: Paging) -> "AttentionPlan":
        """Return the plan of a step for layers with this key."""
        return self.planner(self, paging)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def quantized(self) -> bool:
        return self.cache.FORMAT is not None

    @property
    def can_have_producer(self) -> bool:
        """Whether large tiles may have a producer: on Hopper, for pools that are matrices of keys and values."""
        cache, size = self.cache, self.head_dim
        strides = ((cache.K_BLOCK, cache.K_HEAD, cache.K_SLOT), (cache.V_BLOCK, cache.V_HEAD, cache.V_SLOT))
        plain = not self.quantized and self.dtype.itemsize == 2 and size == self.value_dim and not self.shares_memory
        return (
            plain
            and self.device.chip == HOPPER
            and size in PRODUCER_TILES
            and cache.BLOCK_SIZE >= MIN_COPIED_ROWS
            and all(block % slot == head % slot == slot % ALIGNED_ELEMENTS == 0 for block, head, slot in strides)
        )

    def within_blocks(self, tile: Tile) -> Tile:
        """Return the tile; for a layer with packed blocks, with steps of one block, or half of one if keys are wide.

        Wide keys would spill.
        """
        if self.cache.PACKED is None:
            return tile
        most = BLOCK_SIZE if max(self.head_dim, self.value_dim) <= 128 else BLOCK_SIZE // 2
        return tile._replace(block_n=min(tile.block_n, most))

    def step_arguments(self, paging: Paging) -> dict[str, Any]:
        """Return the arguments of the kernels that all layers with this key share."""
        stride_q_token, stride_q_head = self.query_strides
        packed = paging.packed if self.cache.PACKED else None
        return dict(
            packed_tables=packed and packed.block_tables, stride_packed_table=packed and packed.block_tables.stride(0),
            block_tables=paging.block_tables, context_lens=paging.context_lens, query_starts=paging.query_starts,
            num_seqs=paging.num_seqs, stride_table=paging.block_tables.stride(0),
            stride_o_token=self.num_heads * self.value_dim, stride_o_head=self.value_dim,
            stride_q_token=stride_q_token, stride_q_head=stride_q_head, CACHE=self.cache,
        )  # fmt: skip


class Layer(NamedTuple):
    """The constants of a layer in the attention kernels, besides its `CacheLayout`."""

    NUM_HEADS: int
    GROUP: int  # query heads per KV head
    HEADS: int  # query heads of a group in one tile
    HEAD_DIM: int  # of keys and queries
    VALUE_DIM: int
    FIRST_DIM: int  # elements of a key in the first of the two parts in which a tile holds keys
    BLOCK_D: int  # sizes of these parts; see `key_blocks`
    BLOCK_R: int
    BLOCK_V: int  # elements of a value in a tile
    HALVES: bool  # whether the parts of a key, and of the columns of a tile's values, are halves, as in packed blocks
    SHARED: bool  # whether values are taken from the first part of a tile of keys
    HAS_WINDOW: bool
    HAS_SOFTCAP: bool
    HAS_SINKS: bool
    PRECISION: str  # input_precision of tl.dot
    CODE_UNIT: float  # value of a quantized key or value with scale 1, divided by that of its code in a tile

    @classmethod
    def of(cls, key: LayerKey, heads: int) -> "Layer":
        """Return the constants of a layer whose tiles take `heads` heads of a group."""
        block_d, block_r = key_blocks(key.head_dim)
        first_dim, block_v = min(key.head_dim, block_d), padded_head_dim(key.value_dim)
        if key.cache.PACKED:
            first_dim, block_v = key.head_dim // 2, 2 * padded_head_dim(key.value_dim // 2)
            block_d = block_r = padded_head_dim(first_dim)
        # Values that share the memory of the keys are in a tile of keys already, if they are within its first part.
        shared = key.shares_memory and key.value_dim <= block_d
        return cls(
            NUM_HEADS=key.num_heads, GROUP=key.group, HEADS=heads,
            HEAD_DIM=key.head_dim, VALUE_DIM=key.value_dim, FIRST_DIM=first_dim, BLOCK_D=block_d, BLOCK_R=block_r,
            BLOCK_V=block_d if shared else block_v, HALVES=key.cache.PACKED is not None, SHARED=shared,
            HAS_WINDOW=key.sliding_window is not None, HAS_SOFTCAP=key.has_softcap, HAS_SINKS=key.has_sinks,
            PRECISION="ieee" if key.dtype == torch.float32 else "tf32",  # tf32 would drop 13 bits of fp32
            CODE_UNIT=256.0 if key.cache.FORMAT == "fp8" and not key.device.converts_fp8 else 1.0,
        )  # fmt: skip

    @property
    def HEAD_TILES(self) -> int:
        """Tiles of a group."""
        return -(-self.GROUP // self.HEADS)


@dataclass(frozen=True)
class LaunchTemplate:
    """A launch without the arguments that change from layer to layer."""

    kernel: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]
    varying: tuple[str, ...]

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], named: dict[str, Any]) -> "LaunchTemplate":
        """Create the template from named arguments and compiler options. Names that the kernel does not have are
        ignored. The launch is dependent only if the kernel waits for the previous one."""
        constants = {name: named[name] for name in (*kernel.arg_names, *OPTIONS) if name in named}
        if "DEPENDENT" not in kernel.arg_names:
            constants.pop("launch_pdl", None)
        return cls(kernel, grid, constants, tuple(name for name in kernel.arg_names if name not in named))

    def launch(self, layer: dict[str, Any]) -> Launch:
        """Return the launch for a layer with these arguments."""
        return Launch(self.kernel, self.grid, {**self.constants, **{name: layer[name] for name in self.varying}})


@dataclass(frozen=True)
class AttentionPlan:
    """The launches of attention for all layers of a step with the same `LayerKey`."""

    templates: list[LaunchTemplate]  # in order
    partial_rows: int = 0  # rows of partial results
    counters: int = 0  # counters of finished splits
    describe: Callable[[LayerCache], dict[str, Any]] = lambda cache: {}  # arguments that some kernels need

    def launches(
        self, out: Tensor, query: Tensor, cache: LayerCache, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launches for a layer."""
        partials = logs = arrivals = None
        if self.partial_rows:
            partials, logs = partial_results(self.partial_rows, cache.value_dim, query.device)
        if self.counters:
            arrivals = zeros(self.counters, query.device)
        layer = dict(
            out=out, query=query, key_cache=as_bytes(cache.keys), value_cache=as_bytes(cache.values),
            key_scales=cache.key_scales, value_scales=cache.value_scales, key_channels=cache.key_channels,
            **packed_arguments(cache), sinks=sinks, window=window or 0,
            scale=scale / softcap if softcap else scale * LOG2E, softcap=(softcap or 0.0) * LOG2E,
            partials=partials, logs=logs, arrivals=arrivals, **self.describe(cache),
        )  # fmt: skip
        return [template.launch(layer) for template in self.templates]


def packed_arguments(cache: LayerCache) -> dict[str, Tensor | None]:
    """Return the packed blocks of a layer as arguments of the kernels."""
    names = [field.name for field in fields(PackedBlocks)]
    return {f"packed_{name}": cache.packed and getattr(cache.packed, name) for name in names}


def partial_results(rows: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for partial results [rows, value_dim] in fp32, and for the logarithms of their denominators."""
    first_log = -(-rows * value_dim // ALIGNED) * ALIGNED
    workspace = torch.empty(first_log + rows, dtype=torch.float32, device=device)
    return workspace[:first_log], workspace[first_log:]
