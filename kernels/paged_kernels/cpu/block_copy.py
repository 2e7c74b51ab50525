"""Copies of whole blocks between two caches with PyTorch on a CPU."""

from torch import Tensor

from paged_kernels.block_pair import BlockPair


def block_copy(pair: BlockPair, moves: Tensor, *, programs: int | None = None) -> None:
    """Compute `paged_kernels.block_copy.block_copy`; `programs` has no effect."""
    sources, targets = moves.unbind(1)
    for source, target in zip(pair.sources, pair.targets, strict=True):
        target.index_copy_(0, targets, source.index_select(0, sources))
