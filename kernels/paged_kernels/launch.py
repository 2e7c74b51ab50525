"""The launch of a kernel, and the tile, split and grid sizes of the attention kernels. Imports no triton.

A launch shape depends only on what the host knows about a step: tile shapes come from `launch_table`, and the number
of splits from the batch and the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from paged_kernels.launch_table import Tile, TuningKey, decode_tile, find_tile, power_of_two

MIN_SPLIT = 256  # minimum keys of a split; starting and merging a shorter one costs more than it saves
MAX_SPLITS = 64  # maximum splits of a sequence, which the merge reads at once
MAX_SPLIT_LEN = 16384  # maximum keys of a split, so that no program computes a long sequence alone
WIDEST_SINGLE = 256  # elements of the widest key that is padded to a power of two
MIN_RELATIVE_OCCUPANCY = 0.9  # share of the best occupancy that the number of splits must reach
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")  # compiler options among the arguments of a launch
DEFAULT_MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200, for runs without a GPU


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that launch shapes depend on."""

    chip: str  # name of its table: "sm_90", "gfx942"
    multiprocessors: int


@cache
def device_of(device: torch.device) -> Device:
    """Return the properties of a GPU, or those of an H100 for the CPU, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return Device("sm_90", DEFAULT_MULTIPROCESSORS)
    found = torch.cuda.get_device_properties(device)
    hip = getattr(found, "gcnArchName", "") if torch.version.hip else ""
    return Device(hip.split(":")[0] or f"sm_{found.major}{found.minor}", found.multi_processor_count)


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, and its arguments and compiler options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch the kernel. Returns the compiled kernel, or None in the interpreter and if it was intercepted."""
        if _handler is not None:
            return _handler(self)
        return self.kernel[self.grid](**self.arguments)


@dataclass(frozen=True)
class LaunchTemplate:
    """A launch without the arguments that change from layer to layer."""

    kernel: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]
    varying: tuple[str, ...]

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], named: dict[str, Any]) -> "LaunchTemplate":
        """Create the template from arguments and compiler options by name, of which it takes those it has."""
        constants = {name: named[name] for name in (*kernel.arg_names, *OPTIONS) if name in named}
        return cls(kernel, grid, constants, tuple(name for name in kernel.arg_names if name not in named))

    def launch(self, layer: dict[str, Any]) -> Launch:
        """Return the launch for a layer with these arguments."""
        return Launch(self.kernel, self.grid, {**self.constants, **{name: layer[name] for name in self.varying}})


_handler: Callable[[Launch], None] | None = None  # takes all launches of the process


@contextmanager
def intercept_launches(handler: Callable[[Launch], None]) -> Iterator[None]:
    """Hand all launches of the process to `handler`, instead of launching them."""
    global _handler
    previous, _handler = _handler, handler
    try:
        yield
    finally:
        _handler = previous


class Choice(NamedTuple):
    """The decisions on the attention of a step that depend on the sizes of the whole step, not only on its longest
    chunk."""

    splits: int  # splits of each sequence's keys, which are merged if there are several
    small_tiles: bool  # whether large tiles would occupy too few multiprocessors


CHOICES = tuple(Choice(splits, small_tiles) for splits in (1, 2) for small_tiles in (False, True))
_forced: Choice | None = None


@contextmanager
def force(choice: Choice) -> Iterator[None]:
    """Make the plans of all launches follow `choice` instead of the sizes of the step, so that each is compiled."""
    global _forced
    previous, _forced = _forced, choice
    try:
        yield
    finally:
        _forced = previous


@dataclass(frozen=True)
class LaunchShape:
    """Compile-time constants of the attention kernel, under the kernel's parameter names."""

    HEADS: int  # query heads of a group in one tile
    SMALL_M: int  # rows of a tile that holds all queries of a sequence
    SMALL_N: int
    SMALL_STAGES: int
    LARGE_M: int  # rows of a tile for longer chunks; 0: the step has no longer chunk
    LARGE_N: int
    LARGE_STAGES: int
    num_warps: int


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
) -> LaunchShape:
    """Choose the tiles of a step: small ones only if one holds every query of a sequence, else small and large ones.

    A decode row in a launch with large tiles keeps its small tile: in a tile of 128 rows it would compute 32 times as
    much as necessary. Its program still takes the registers and shared memory of the large tile's code.
    """
    block_d = key_blocks(head_dim)[0]
    heads, rows = heads_per_tile(group, itemsize, block_d), rows_of_query(group, itemsize, block_d)
    one_tile = max_query_len * heads <= max_small_rows(itemsize, block_d)
    if one_tile:
        rows = max(rows, power_of_two(max_query_len * heads))
    small = decode_tile(chip, block_d=block_d, itemsize=itemsize, rows=rows, quantized=quantized)
    if one_tile:
        return LaunchShape(heads, rows, small.block_n, small.num_stages, 0, 0, 0, small.num_warps)

    def tile(length: int) -> Tile:
        return find_tile(chip, TuningKey(block_d, itemsize, rows, quantized, power_of_two(length)))

    large = tile(max_query_len)
    block_m = max(rows, large.block_m)
    programs = (num_tokens * heads // block_m + 1) * num_kv_heads * -(-group // heads)
    too_few = _forced.small_tiles if _forced else programs < multiprocessors
    if block_m > 64 >= rows and too_few:  # halves the rows per tile, doubles the programs
        large, block_m = tile(1), 64
    return LaunchShape(
        heads, rows, small.block_n, small.num_stages, block_m, large.block_n, large.num_stages, large.num_warps
    )  # fmt: skip


def prefix_tile(*, chip: str, head_dim: int, itemsize: int, group: int, quantized: bool, num_seqs: int) -> Tile:
    """Choose the tile of the shared-prefix pass: a prefill tile whose rows are decode rows of several sequences."""
    block_d = key_blocks(head_dim)[0]
    heads, rows = heads_per_tile(group, itemsize, block_d), rows_of_query(group, itemsize, block_d)
    length = 4096 if num_seqs * heads > 64 else 1  # tokens of a chunk that fills as many rows, or one tile of 64
    tile = find_tile(chip, TuningKey(block_d, itemsize, rows, quantized, length))
    smaller = max(rows, min(tile.block_m, power_of_two(num_seqs * heads)))
    return replace(tile, block_m=max(smaller, 64 if tile.block_m >= 64 else 16))


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
    if _forced:
        return _forced.splits
    most = min(MAX_SPLITS, power_of_two(max_len) // MIN_SPLIT)
    if most <= 1 or programs <= 0:
        return 1

    def occupancy(splits: int) -> float:
        work = programs * splits
        return work / (multiprocessors * -(-work // multiprocessors))

    # Eight programs per multiprocessor balance the load; more splits would only add empty programs.
    balanced = min(most, -(-power_of_two(max_len) // MAX_SPLIT_LEN), max(1, 8 * multiprocessors // programs))
    enough = MIN_RELATIVE_OCCUPANCY * max(occupancy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if splits >= balanced and occupancy(splits) >= enough)
