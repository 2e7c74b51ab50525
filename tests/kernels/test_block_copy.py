"""block_copy against the reference: Triton in the interpreter or on a GPU, and PyTorch on a CPU."""

import pytest
import torch
from torch import Tensor

from paged_kernels.block_copy import block_copy, block_copy_reference
from paged_kernels.cpu.pytorch import block_copy as block_copy_cpu
from paged_kernels.launch_table import DEFAULT_ROW_TILES
from paged_kernels.layer_cache import BlockPair

MOVES = [(3, 0), (1, 5), (4, 2)]
SHAPES = {  # shapes of a block, by alignment
    1: [((3,), torch.int8), ((2, 5), torch.int8)],
    2: [((3, 1), torch.float16)],
    4: [((2, 4, 8), torch.int8), ((5,), torch.float32)],
    8: [((2, 3), torch.float32)],
    16: [
        ((2, 16, 64), torch.bfloat16),
        ((2, 16), torch.float32),
        ((3, DEFAULT_ROW_TILES["block_copy"].elements), torch.int8),
    ],
}


def make_cache(shapes: list, num_blocks: int, seed: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-100, 100, (num_blocks, *shape), generator=generator) for shape, _ in shapes]
    return [part.to(device, dtype) for part, (_, dtype) in zip(parts, shapes, strict=True)]


def make_pair(aligned: int, itself: bool, device: str) -> BlockPair:
    cache = make_cache(SHAPES[aligned], 6, 0, device)
    return BlockPair.of(cache, cache if itself else make_cache(SHAPES[aligned], 7, 1, device))


def check(copy, pair: BlockPair, expected: BlockPair, moves: list[tuple[int, int]], **options: int) -> None:
    """Compare every tensor of both caches after the copy, changed or not."""
    listed = torch.tensor(moves).to(pair.table.device)
    block_copy_reference(expected, listed)
    copy(pair, listed, **options)
    for name in ("sources", "targets"):
        assert all(map(torch.equal, getattr(pair, name), getattr(expected, name)))


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("aligned", SHAPES)
def test_triton_matches_reference(aligned, itself, device):
    pair = make_pair(aligned, itself, device)
    assert pair.aligned == aligned
    check(block_copy, pair, make_pair(aligned, itself, device), MOVES)


@pytest.mark.parametrize("programs", [1, 2, 100])
def test_any_number_of_programs_copies_everything(programs, device):
    check(block_copy, make_pair(16, False, device), make_pair(16, False, device), MOVES, programs=programs)


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("aligned", SHAPES)
def test_cpu_matches_reference(aligned, itself):
    check(block_copy_cpu, make_pair(aligned, itself, "cpu"), make_pair(aligned, itself, "cpu"), MOVES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("out", [True, False])
def test_copies_to_and_from_pinned_host_memory(out):
    def make() -> BlockPair:
        there = make_cache(SHAPES[16], 6, 0, "cuda")
        here = [part.pin_memory() for part in make_cache(SHAPES[16], 7, 1, "cpu")]
        return BlockPair.of(there, here) if out else BlockPair.of(here, there)

    pair, expected = make(), make()
    check(block_copy, pair, expected, MOVES)
    torch.cuda.synchronize()
    assert all(map(torch.equal, pair.targets, expected.targets))


# --- the table from which a kernel copies blocks


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
