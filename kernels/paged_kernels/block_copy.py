"""Copies of whole blocks of every tensor of a cache, within the cache or to another one, in one launch.

The tensors may differ in size, since their addresses are data. Either cache may also be in pinned host memory, which a
kernel can read and write at its host addresses under the unified addressing of CUDA and HIP.
"""

import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import row_tile
from paged_kernels.layer_cache import BlockPair


@triton.jit(do_not_specialize=["num_moves"])
def block_copy_kernel(  # type: ignore[no-untyped-def]
    moves, table, num_moves, num_tensors, num_tiles,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy every num_programs-th tile of all blocks. Grid: (num_programs,).

    table [3, num_tensors]: addresses of the sources, addresses of the targets, bytes of a block. WORD: bytes of an
    element. ALIGNED: a divisor of all addresses and sizes. TILE: words of a tile.
    """
    element = tl.int32 if WORD == 4 else tl.int8
    for work in range(tl.program_id(0), num_moves * num_tensors * num_tiles, tl.num_programs(0)):
        move, rest = work // (num_tensors * num_tiles), work % (num_tensors * num_tiles)
        tensor, tile = rest // num_tiles, rest % num_tiles
        nbytes = tl.load(table + 2 * num_tensors + tensor)
        source = tl.load(table + tensor) + tl.load(moves + 2 * move) * nbytes
        target = tl.load(table + num_tensors + tensor) + tl.load(moves + 2 * move + 1) * nbytes
        sources = tl.multiple_of(source, ALIGNED).to(tl.pointer_type(element))
        targets = tl.multiple_of(target, ALIGNED).to(tl.pointer_type(element))
        sources, targets = tl.multiple_of(sources, ALIGNED), tl.multiple_of(targets, ALIGNED)
        word = tile * TILE + tl.arange(0, TILE)
        inside = word < tl.multiple_of(nbytes // WORD, ALIGNED // WORD)
        tl.store(targets + word, tl.load(sources + word, mask=inside), mask=inside)


def plan_launch(
    moves: Tensor, table: Tensor, *, largest: int, aligned: int, programs: int | None = None, device: Device
) -> Launch:
    """Return the launch. For the parameters, see `block_copy` and the fields of `BlockPair`."""
    num_moves, num_tensors = len(moves), table.shape[1]
    tile = row_tile(device.chip, "block_copy", width=largest, rows=num_moves)
    word, num_tiles = 4 if aligned >= 4 else 1, triton.cdiv(largest, tile.elements)
    work = num_moves * num_tensors * num_tiles
    arguments = dict(
        moves=moves, table=table, num_moves=num_moves, num_tensors=num_tensors, num_tiles=num_tiles,
        WORD=word, ALIGNED=aligned if word == 4 else 1, TILE=tile.elements // word, num_warps=tile.num_warps,
    )  # fmt: skip
    return Launch(block_copy_kernel, (min(work, programs or work),), arguments)


def block_copy(
    pair: BlockPair,
    moves: Tensor,  # [num_moves, 2] int64: source and target block; at least one
    *,
    programs: int | None = None,  # maximum number of programs, which leaves the rest of the GPU to other work
) -> None:
    """Copy whole blocks of every tensor, in place.

    The order of the copies is undefined: no target may be a source in the same cache, or appear twice.
    """
    plan_launch(
        moves, pair.table, largest=pair.largest, aligned=pair.aligned, programs=programs, device=device_of(moves.device)
    ).run()


def block_copy_reference(pair: BlockPair, moves: Tensor) -> None:
    """Copy one block at a time. The definition of `block_copy` for tests; slow."""
    for source, target in moves.tolist():
        for here, there in zip(pair.sources, pair.targets, strict=True):
            there[target] = here[source]
