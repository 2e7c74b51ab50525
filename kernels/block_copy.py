"""Copies whole blocks of every tensor of a cache, to the same cache or another's, in one launch.

The tensors may have any sizes: their addresses are data. So either cache may be in pinned host memory as well, which
under CUDA's unified addressing (and HIP's) a kernel reads and writes through the host's own addresses.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

PIECE = 16384  # bytes that a program copies at a time


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
    moves: Tensor, table: Tensor, largest: int, aligned: int, programs: int | None
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the kernel's arguments and options by name; to launch, and to compile ahead of time. `largest`:
    bytes of the largest block of a tensor; `programs`: at most so many, where the rest of the GPU is wanted."""
    num_moves, num_tensors = len(moves), table.shape[1]
    word = 4 if aligned >= 4 else 1
    pieces = triton.cdiv(largest, PIECE)
    work = num_moves * num_tensors * pieces
    arguments = dict(
        moves=moves, table=table, num_moves=num_moves, num_tensors=num_tensors, pieces=pieces,
        WORD=word, ALIGNED=aligned if word == 4 else 1, TILE=PIECE // word, num_warps=8,
    )  # fmt: skip
    return (min(work, programs or work),), arguments
