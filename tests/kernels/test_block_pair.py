"""Pairs of caches: the table from which a kernel copies blocks."""

import pytest
import torch

from paged_kernels.block_pair import BlockPair


def test_table_has_the_addresses_and_block_sizes_of_all_tensors():
    sources = torch.zeros(3, 4, 8), torch.zeros(3, 5, dtype=torch.int8)
    targets = torch.zeros(7, 4, 8), torch.zeros(7, 5, dtype=torch.int8)
    pair = BlockPair.of(sources, targets)
    addresses = [[one.data_ptr() for one in tensors] for tensors in (sources, targets)]
    assert pair.table.tolist() == [*addresses, [4 * 8 * 4, 5]]
    assert pair.largest == 128


@pytest.mark.parametrize(("block_bytes", "aligned"), [(64, 16), (48, 16), (24, 8), (12, 4), (6, 2), (5, 1)])
def test_alignment_divides_every_block_of_every_tensor(block_bytes, aligned):
    """A kernel copies so many bytes at once."""
    tensors = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, block_bytes, dtype=torch.int8)
    assert BlockPair.of(tensors, tensors).aligned == aligned
