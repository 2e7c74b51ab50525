"""Full blocks of keys and values in four bits.

Keys are quantized per channel, over the 32 tokens of a block, and values per token, over 32 channels (KIVI, Liu et al.
2024, arXiv:2402.02750). A token of a block that is not full has no range of its channels yet. So every layer also has
a cache in int8 (`layer_cache.LayerCache`), to which new tokens are written:

    tokens      0 ... 31   32 ... 63   64 ... 95   96 ... 101
    packed        (17)         4           9           -         a query at 101 reads tokens 32 to 95 here
    int8           3           -           -          22         and the first block and its own one here

When a step has written the last token of a block, the block is packed, from what the int8 cache holds of it. So what a
query reads depends on its position, and not on the steps in which the tokens before it were computed. The first block
is read in int8, as many models attend to the first token most of all (attention sinks, Xiao et al. 2023,
arXiv:2309.17453), and its keys are so large that they would set the range of their block. It is packed like any other.

    key   = code * scale + zero           scale, zero: of a block, head and channel
    value = (code - 7.5) * scale          scale: of a token, head and 32 channels

A scale is a byte: 5 bits of exponent and 3 of mantissa, from 2**-18 to 1.75 * 2**13. `NAN_SCALE` stands for NaN: a row
or channel with an element that is not finite. A byte of codes has element i in its low half, and element i + size / 2
in its high half. All operations are exact or rounded as in IEEE 754, so all implementations write the same bits. Only
the bits of a zero that is NaN may differ.

Imports no triton.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE = 32  # tokens of a block, which share the scales of the channels of keys
GROUP = 32  # channels of a value that share a scale
EXPONENT_BIAS = 109 << 3  # what is added to a scale's byte, shifted to the exponent and mantissa of a float32
NAN_SCALE = 255
LARGEST_CODE = 15.0


class PackedLayout(NamedTuple):
    """The strides of packed blocks from block to block, which are constants of the Triton kernels."""

    KEY_CODES: int
    KEY_SCALES: int
    KEY_ZEROS: int
    VALUE_CODES: int
    VALUE_SCALES: int


@dataclass(frozen=True, eq=False)
class PackedBlocks:
    """The packed keys and values of one layer. All tensors are dense within a block."""

    key_codes: Tensor  # [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim / 2] uint8
    key_scales: Tensor  # [num_blocks, num_kv_heads, head_dim] uint8
    key_zeros: Tensor  # [num_blocks, num_kv_heads, head_dim] fp16
    value_codes: Tensor  # [num_blocks, num_kv_heads, BLOCK_SIZE, value_dim / 2] uint8
    value_scales: Tensor  # [num_blocks, num_kv_heads, BLOCK_SIZE, value_dim / GROUP] uint8

    @staticmethod
    def shapes(num_kv_heads: int, head_dim: int, value_dim: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and the type of each tensor in a block, in their order."""
        return [
            ((num_kv_heads, BLOCK_SIZE, head_dim // 2), torch.uint8),
            ((num_kv_heads, head_dim), torch.uint8),
            ((num_kv_heads, head_dim), torch.float16),
            ((num_kv_heads, BLOCK_SIZE, value_dim // 2), torch.uint8),
            ((num_kv_heads, BLOCK_SIZE, value_dim // GROUP), torch.uint8),
        ]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, with the block as first dimension."""
        return self.key_codes, self.key_scales, self.key_zeros, self.value_codes, self.value_scales

    @property
    def layout(self) -> PackedLayout:
        """The constants of the blocks in the Triton kernels."""
        return PackedLayout(*(tensor.stride(0) for tensor in self.tensors))

    def write(self, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Pack blocks. blocks: [n] int64. keys, values: [n, num_kv_heads, BLOCK_SIZE, head_dim or value_dim] fp32."""
        low, high = keys.amin(dim=2), keys.amax(dim=2)  # NaN if an element is NaN
        scales = _bytes_of_scales((high - low) / torch.full_like(low, LARGEST_CODE))
        zeros = low.to(torch.float16)
        scales = torch.where(zeros.isfinite(), scales, NAN_SCALE).to(torch.uint8)
        offsets = keys - zeros.float()[:, :, None]
        self.key_codes[blocks] = _halves(_nearest(offsets / scales_of_bytes(scales)[:, :, None]))
        self.key_scales[blocks], self.key_zeros[blocks] = scales, zeros
        groups = values.unflatten(3, (-1, GROUP))
        top = groups.abs().amax(dim=4)
        scales = _bytes_of_scales(top / torch.full_like(top, LARGEST_CODE / 2))
        codes = groups / scales_of_bytes(scales)[..., None] + LARGEST_CODE / 2
        self.value_codes[blocks], self.value_scales[blocks] = _halves(_nearest(codes.flatten(3))), scales

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of blocks [n] in fp32, in the shape of `write`."""
        keys = _elements(self.key_codes[blocks]) * scales_of_bytes(self.key_scales[blocks])[:, :, None]
        keys += self.key_zeros[blocks].float()[:, :, None]
        groups = _elements(self.value_codes[blocks]).unflatten(3, (-1, GROUP)) - LARGEST_CODE / 2
        return keys, (groups * scales_of_bytes(self.value_scales[blocks])[..., None]).flatten(3)


def is_packed(keys: Tensor, queries: Tensor) -> Tensor:
    """Return whether the queries at some positions read the keys at others from packed blocks. Both are broadcast."""
    blocks = keys // BLOCK_SIZE
    return (blocks > 0) & (blocks < queries // BLOCK_SIZE)


def full_blocks(slots: Tensor, packed_slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of the int8 cache whose last tokens a step writes, and the blocks into which they are packed.

    slots, packed_slots: [num_tokens] int64, of the new tokens in both caches; -1: nothing is written.
    """
    last = (slots >= 0) & (slots % BLOCK_SIZE == BLOCK_SIZE - 1)
    return slots[last] // BLOCK_SIZE, packed_slots[last] // BLOCK_SIZE


def scales_of_bytes(codes: Tensor) -> Tensor:
    """Return scales in fp32."""
    scales = ((codes.to(torch.int32) + EXPONENT_BIAS) << 20).view(torch.float32)
    return torch.where(codes == NAN_SCALE, torch.nan, scales)


def _bytes_of_scales(scales: Tensor) -> Tensor:
    """Return the bytes of the nearest scales, ties up; NAN_SCALE for scales above the largest, and for NaN."""
    bits = scales.view(torch.int32) & 0x7FFFFFFF  # NaN, which may have a sign, is above all others
    codes = ((bits >> 19) + 1 >> 1) - EXPONENT_BIAS
    return codes.clamp(0, NAN_SCALE).to(torch.uint8)


def _nearest(codes: Tensor) -> Tensor:
    return codes.round().clamp(0, LARGEST_CODE).nan_to_num(nan=0.0).to(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _elements(codes: Tensor) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), dim=-1).float()
