"""Copies whole blocks of every tensor of a cache, to the same cache or another's, in one launch.

The tensors may have any sizes: their addresses are data. So either cache may be in pinned host memory as well, which
under CUDA's unified addressing (and HIP's) a kernel reads and writes through the host's own addresses.
"""

import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import launch
from paged_kernels.block_pair import BlockPair
from paged_kernels.launch import Device, Launch, device_of


@triton.jit(do_not_specialize=["num_moves"])
def block_copy_kernel(
    moves, table, num_moves, num_tensors, pieces,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (num_programs,): each takes every num_programs-th piece of all blocks. `table`, [3, num_tensors]: addresses
    of the sources, of the targets, and bytes of a block. WORD: bytes of an element; ALIGNED: what addresses and sizes
    are multiples of; TILE: words of a piece."""
    element = tl.int32 if WORD == 4 else tl.int8
    for work in range(tl.program_id(0), num_moves * num_tensors * pieces, tl.num_programs(0)):
        move, rest = work // (num_tensors * pieces), work % (num_tensors * pieces)
        tensor, piece = rest // pieces, rest % pieces
        nbytes = tl.load(table + 2 * num_tensors + tensor)
        source = tl.load(table + tensor) + tl.load(moves + 2 * move) * nbytes
        target = tl.load(table + num_tensors + tensor) + tl.load(moves + 2 * move + 1) * nbytes
        sources = tl.multiple_of(source, ALIGNED).to(tl.pointer_type(element))
        targets = tl.multiple_of(target, ALIGNED).to(tl.pointer_type(element))
        sources, targets = tl.multiple_of(sources, ALIGNED), tl.multiple_of(targets, ALIGNED)
        word = piece * TILE + tl.arange(0, TILE)
        inside = word < tl.multiple_of(nbytes // WORD, ALIGNED // WORD)
        tl.store(targets + word, tl.load(sources + word, mask=inside), mask=inside)


def plan_launch(
    moves: Tensor, table: Tensor, *, largest: int, aligned: int, programs: int | None = None, device: Device
) -> Launch:
    """The names are those of `BlockPair` and `block_copy`."""
    num_moves, num_tensors = len(moves), table.shape[1]
    piece = launch.row_tile(device, "block_copy", width=largest, rows=num_moves)
    word, pieces = 4 if aligned >= 4 else 1, triton.cdiv(largest, piece.elements)
    work = num_moves * num_tensors * pieces
    arguments = dict(
        moves=moves, table=table, num_moves=num_moves, num_tensors=num_tensors, pieces=pieces,
        WORD=word, ALIGNED=aligned if word == 4 else 1, TILE=piece.elements // word, num_warps=piece.num_warps,
    )  # fmt: skip
    return Launch(block_copy_kernel, (min(work, programs or work),), arguments)


def block_copy(
    pair: BlockPair,
    moves: Tensor,  # [num_moves, 2] int64: source and target block; at least one
    *,
    programs: int | None = None,  # at most so many, where the rest of the GPU is wanted for something else
) -> None:
    """Copies whole blocks of every tensor, in place. No target may be a source of the same cache, nor be there twice:
    nothing is said about the order."""
    plan_launch(
        moves, pair.table, largest=pair.largest, aligned=pair.aligned, programs=programs, device=device_of(moves.device)
    ).run()


def block_copy_reference(pair: BlockPair, moves: Tensor) -> None:
    """What `block_copy` means, one block at a time; for tests, not for speed."""
    for source, target in moves.tolist():
        for here, there in zip(pair.sources, pair.targets, strict=True):
            there[target] = here[source]
