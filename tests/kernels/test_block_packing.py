"""The kernel that packs full blocks, against their definition."""

import pytest
import torch

from paged_kernels.launch import device_of
from paged_kernels.layer_cache import LayerCache, pack_full_blocks, plain_channels
from paged_kernels.packed_blocks import BLOCK_SIZE, NAN_SCALE, PackedBlocks
from paged_kernels.paged_attention import plan_launch
from paged_kernels.paging import Paging
from tests.support.attention_cases import replace_paging

NUM_BLOCKS, NUM_KV_HEADS = 6, 2
LAST = BLOCK_SIZE - 1
# Slots of new tokens in both caches: a block of one token, two of a chunk, some that are not full, and padding.
SLOTS = [4 * BLOCK_SIZE + LAST, *range(BLOCK_SIZE - 3, 2 * BLOCK_SIZE), 3 * BLOCK_SIZE + LAST - 1, -1]
PACKED_SLOTS = [LAST, *range(3 * BLOCK_SIZE - 3, 4 * BLOCK_SIZE), BLOCK_SIZE + LAST - 1, -1]


def make_cache(head_dim: int, value_dim: int, device: str) -> LayerCache:
    """Make a full pool, with values that lie between two codes, elements of every size, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)

    def codes(size: int) -> torch.Tensor:
        shape = NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, size
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)[:, 1]

    keys, values = codes(head_dim), codes(value_dim)
    scales = torch.rand((2, *keys.shape[:3]), generator=generator)
    scales *= torch.exp2(torch.randint(-12, 9, scales.shape, generator=generator))
    keys[1, 0] = keys[1, 0].abs() % 31  # a range of 30 of which the scale is 2: odd numbers are between two codes
    keys[1, 0, 3], keys[1, 0, 4] = 0, 30
    values[1, 0] = values[1, 0] % 16  # 15 at most: the scale is 2, and even numbers are between two codes
    values[1, 0, :, ::8] = 15
    scales[:, 1, 0] = 0.125
    keys[4, 0, :, 0] = 0  # a channel without range
    scales[:, 4, 0] *= 2.0**-20  # below the smallest scale
    scales[0, 4, 1, 0] = scales[1, 4, 1, 1] = torch.nan
    scales[0, 0, 0, 5], scales[1, 0, 0, 6] = torch.inf, torch.inf
    scales[:, 0, 1] = 500  # zeros and scales that are almost the largest, and beyond them because of one token
    scales[:, 0, 1, 7], keys[0, 1, 7, ::3] = 3000, 1
    packed = [
        torch.randint(0, NAN_SCALE, (NUM_BLOCKS, *shape), generator=generator).to(dtype)
        for shape, dtype in PackedBlocks.shapes(NUM_KV_HEADS, head_dim, value_dim)
    ]
    return LayerCache(
        keys.to(device), values.to(device), *scales.to(device),
        key_channels=plain_channels(NUM_KV_HEADS, head_dim, torch.device(device)),
        packed=PackedBlocks(*(tensor.to(device) for tensor in packed)),
    )  # fmt: skip


def pack(cache: LayerCache, slots: torch.Tensor, packed_slots: torch.Tensor) -> tuple[int, ...]:
    """Run the first launch of attention, and return its grid."""
    lengths = torch.ones(len(slots), dtype=torch.int32, device=slots.device)
    starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    paging = Paging(slots, lengths[:, None], lengths, starts, 1, 1)
    paging = replace_paging(paging, packed=replace_paging(paging, slots=packed_slots))
    query = torch.zeros((len(slots), NUM_KV_HEADS, cache.keys.shape[3]), device=slots.device)
    settings = dict(scale=1.0, sliding_window=None, softcap=None, sinks=None, device=device_of(slots.device))
    first = plan_launch(query, query, cache, paging, **settings)[0]
    first.run()
    return first.grid


@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (96, 64), (64, 96), (128, 192)])
def test_blocks_have_the_bits_of_their_definition(head_dim, value_dim, device):
    expected, actual = (make_cache(head_dim, value_dim, device) for _ in range(2))
    slots, packed_slots = torch.tensor(SLOTS, device=device), torch.tensor(PACKED_SLOTS, device=device)
    pack_full_blocks(expected, slots, packed_slots)
    found = expected.packed.key_scales[[0, 2]].flatten().tolist()
    assert {0, NAN_SCALE} <= set(found) and any(248 <= code < NAN_SCALE for code in found)
    assert not expected.packed.key_zeros[2, 1].isfinite().all()
    for _ in range(2):  # a block may be packed again
        assert pack(actual, slots, packed_slots) == (len(SLOTS), NUM_KV_HEADS)
        for one, other in zip(actual.packed.tensors, expected.packed.tensors, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one[~one.isnan()].view(torch.uint8), other[~other.isnan()].view(torch.uint8))
