"""The keys and values of one layer in the block pool, their quantization to one byte per element, and pairs of caches.

Imports no triton.

A quantized pool stores, for each token and KV head, one-byte codes and one scale: element = code * scale. The largest
element of a row gets the format's largest code, and every other element the nearest code (ties to even). The error of
an element is at most max|x| / 254 in int8, and in fp8 (e4m3) at most |x| / 16, or max|x| / 458752 where that is more.
A row with an element that is not finite gets the scale NaN, so all attention over it is NaN.

Of keys, a few channels have much larger elements than the others, and would set the scale of all (KIVI,
arXiv:2402.02750). So the channels of keys are brought to a similar size first: a center is subtracted, and the rest is
multiplied by a power of two. Queries are multiplied by its inverse, so that their products with keys stay the same.
The center changes all scores of a query alike, which the softmax does not notice.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paged_kernels.packed_blocks import BLOCK_SIZE, PackedBlocks, PackedLayout, full_blocks

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}  # names of the formats, by the type of a pool
INT4 = torch.uint4  # stands for a cache in int8 whose full blocks are packed
QUANTIZED = (*FORMATS, INT4)  # all types for which there are scales
MAX_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # code of a row's largest element
MIN_ROW_MAX = 2.0**-100  # lower bound of a row's largest magnitude: keeps its scale a normal number, even for zeros


class CacheLayout(NamedTuple):
    """The constants of a layer's cache in the Triton kernels.

    Its strides never change, and knowing their exact divisors (72 = 8 * 9) allows vector loads.
    """

    BLOCK_SIZE: int
    FORMAT: str | None  # name of the quantized format
    MAX_CODE: float | None
    K_BLOCK: int  # strides of keys, values and scales: from block to block, head to head, slot to slot
    K_HEAD: int
    K_SLOT: int
    V_BLOCK: int
    V_HEAD: int
    V_SLOT: int
    S_BLOCK: int
    S_HEAD: int
    HAS_CHANNELS: bool  # whether channels of keys and queries are scaled
    PACKED: PackedLayout | None  # None: no block is packed


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer: unquantized, or with scales in one of FORMATS.

    Values may have another size than keys, or may be the first elements of the keys in the same memory (multi-head
    latent attention): see `latent`.
    """

    keys: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: Tensor  # [num_blocks, num_kv_heads, block_size, value_dim] of the type of keys
    key_scales: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] fp32
    value_scales: Tensor | None = None  # shape and type of key_scales
    key_channels: Tensor | None = None  # [3, num_kv_heads, head_dim] fp32: see `scale_keys`; None: no channel is scaled
    shares_memory: bool = False  # whether values and their scales are views of keys and their scales
    batch_invariant: bool = False  # whether the attention of a query must not depend on the rest of its batch
    packed: PackedBlocks | None = None  # the full blocks in four bits; this cache has the others, in int8

    @classmethod
    def latent(cls, keys: Tensor, value_dim: int, scales: Tensor | None = None) -> "LayerCache":
        """Return a cache whose values are the first `value_dim` elements of its keys."""
        return cls(keys, keys[..., :value_dim], scales, scales, shares_memory=True)

    def __post_init__(self) -> None:
        assert self.keys.shape[:3] == self.values.shape[:3], (self.keys.shape, self.values.shape)
        assert not self.shares_memory or self.values.shape[3] <= self.keys.shape[3]
        assert self.keys.dtype == self.values.dtype, (self.keys.dtype, self.values.dtype)
        assert self.keys.stride(3) == self.values.stride(3) == 1
        for scales in (self.key_scales, self.value_scales):
            assert (scales is None) == (self.format is None), self.keys.dtype
            assert scales is None or (scales.shape == self.keys.shape[:3] and scales.dtype == torch.float32)
            assert scales is None or scales.stride() == (*self.scale_strides, 1)
        if self.key_channels is not None:
            assert self.format and not self.shares_memory
            assert self.key_channels.shape == (3, self.keys.shape[1], self.keys.shape[3])
            assert self.key_channels.dtype == torch.float32 and self.key_channels.is_contiguous()
        if self.packed is not None:
            assert self.keys.dtype == torch.int8 and self.key_channels is not None
            assert self.keys.shape[2] == BLOCK_SIZE

    @property
    def value_dim(self) -> int:
        """Number of elements of a value."""
        return self.values.shape[3]

    @property
    def format(self) -> str | None:
        """Name of the quantized format; None if not quantized."""
        return FORMATS.get(self.keys.dtype)

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Block and head strides of both scale tensors; (0, 0) without scales."""
        return self.key_scales.stride()[:2] if self.key_scales is not None else (0, 0)

    @cached_property
    def layout(self) -> CacheLayout:
        """The constants of the cache in the Triton kernels."""
        k_block, k_head, k_slot = self.keys.stride()[:3]
        v_block, v_head, v_slot = self.values.stride()[:3]
        s_block, s_head = self.scale_strides
        return CacheLayout(
            self.keys.shape[2], self.format, MAX_CODE.get(self.keys.dtype),
            k_block, k_head, k_slot, v_block, v_head, v_slot, s_block, s_head,
            HAS_CHANNELS=self.key_channels is not None, PACKED=self.packed.layout if self.packed else None,
        )  # fmt: skip

    @property
    def pools(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Both tensors with their scales: (keys, key_scales), (values, value_scales)."""
        return (self.keys, self.key_scales), (self.values, self.value_scales)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache, with the block as first dimension, and shared memory once. fp8 is viewed as int8,
        which can be copied."""
        stored: tuple[Tensor | None, ...] = (self.keys, self.values, self.key_scales, self.value_scales)
        if self.shares_memory:
            stored = (self.keys, self.key_scales)
        return tuple(as_bytes(tensor) for tensor in stored if tensor is not None)


@dataclass(frozen=True, eq=False)
class BlockPair:
    """The tensors of a source and of a target cache, paired by shape and type, with the block as first dimension.

    The table of addresses is built once, since the tensors do not move.
    """

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    table: Tensor  # [3, num_tensors] int64: addresses of the sources, addresses of the targets, bytes of a block
    largest: int  # size of the largest block in bytes
    aligned: int  # largest power of two, up to 16, that divides all addresses and block sizes

    @classmethod
    def of(cls, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> "BlockPair":
        """Pair the tensors of two caches. The table is on the GPU if one of the caches is."""
        pairs = list(zip(sources, targets, strict=True))
        for source, target in pairs:
            assert source.is_contiguous() and target.is_contiguous()
            assert source.dtype == target.dtype and source.shape[1:] == target.shape[1:], (source.shape, target.shape)
        numbers = [[tensor.data_ptr() for tensor in sources], [tensor.data_ptr() for tensor in targets]]
        numbers.append([source[:1].nbytes for source, _ in pairs])
        device = next(
            (tensor.device for pair in pairs for tensor in pair if tensor.device.type != "cpu"), torch.device("cpu")
        )
        return cls(
            tuple(sources),
            tuple(targets),
            table=torch.tensor(numbers, dtype=torch.int64).to(device),
            largest=max(numbers[2], default=0),
            aligned=math.gcd(16, *itertools.chain(*numbers)),
        )


def pack_full_blocks(cache: LayerCache, slots: Tensor, packed_slots: Tensor) -> None:
    """Pack the blocks whose last tokens a step has written, if the layer has packed blocks.

    slots, packed_slots: [num_tokens] int64, of the new tokens in `cache` and in `cache.packed`.
    """
    if cache.packed is not None:
        blocks, targets = full_blocks(slots, packed_slots)
        keys, values = (
            pool[blocks].float() * scales[blocks][..., None] for pool, scales in cache.pools if scales is not None
        )
        cache.packed.write(targets, keys, values)


# --- quantization -----------------------------------------------------------------------------------------------------


def plain_channels(num_kv_heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Return channels [3, num_kv_heads, head_dim] that leave keys and queries as they are."""
    return torch.tensor([0.0, 1.0, 1.0], device=device)[:, None, None].repeat(1, num_kv_heads, head_dim)


def scale_keys(keys: Tensor, channels: Tensor) -> Tensor:
    """Return what is quantized of keys [..., num_kv_heads, head_dim], in fp32.

    channels: the center of each channel, its factor, and the inverse of the factor, [3, num_kv_heads, head_dim] fp32.
    """
    return (keys.float() - channels[0]) * channels[1]


def scale_queries(queries: Tensor, channels: Tensor) -> Tensor:
    """Return queries [..., num_heads, head_dim] for keys that `scale_keys` has scaled."""
    group = queries.shape[-2] // channels.shape[1]
    return (queries.float() * channels[2].repeat_interleave(group, dim=0)).to(queries.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return fp8 viewed as int8, and any other tensor unchanged."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes in `dtype`, one of FORMATS, in the shape of x [..., head_dim], and scales [...] in fp32."""
    x = x.float()
    top = x.abs().amax(dim=-1)  # maximum magnitude; NaN if an element is NaN
    # The divisor is a tensor: by a Python number, PyTorch multiplies with the reciprocal on CUDA, one rounding off the
    # IEEE division of the kernels and of the CPU.
    scales = top.clamp(min=MIN_ROW_MAX) / torch.full_like(top, MAX_CODE[dtype])
    scales = torch.where(top.isinf(), torch.nan, scales)
    codes = (x / scales[..., None]).nan_to_num_(nan=0.0)
    # No clamp is needed: a quotient exceeds the largest code by a rounding error only, which rounding removes.
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Write codes [..., head_dim] times scales [...] to `out`, which has the shape of codes, and return it."""
    if codes.dtype == torch.float8_e4m3fn:
        # With one more exponent bit at the top, the bits of an e4m3 are a float16 that is 256 times smaller. PyTorch
        # converts float16 several times faster than float8.
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        codes, scales = bits.view(torch.float16), scales * 256
    wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    wide.copy_(codes).mul_(scales[..., None])
    return out if wide is out else out.copy_(wide)
