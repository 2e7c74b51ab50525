"""One layer's keys and values in the block pool, and how one byte holds an element of them.

A quantized pool keeps, for each token and KV head, codes of one byte and one scale: element = code * scale. The
largest element gets the format's largest code, and the others the nearest one (ties to even). So the error of an
element is at most max|x| / 254 in int8, and in fp8 (e4m3) |x| / 16, or max|x| / 458752 where that is more. A row with
an element that is not finite has the scale NaN: it reads as NaN, and whoever attends to it shows it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}  # what a pool of this type is called
MAX_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the code of a row's largest element
MIN_ROW_MAX = 2.0**-100  # a row's largest element counts as no less: its scale is a normal number, that of zeros too


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values as they are, or, with scales, in one of FORMATS."""

    keys: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: Tensor  # as keys
    key_scales: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] fp32
    value_scales: Tensor | None = None  # as key_scales

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape, (self.keys.shape, self.values.shape)
        assert self.keys.dtype == self.values.dtype, (self.keys.dtype, self.values.dtype)
        assert self.keys.stride(3) == self.values.stride(3) == 1
        for scales in (self.key_scales, self.value_scales):
            assert (scales is None) == (self.format is None), self.keys.dtype
            assert scales is None or (scales.shape == self.keys.shape[:3] and scales.dtype == torch.float32)
            assert scales is None or scales.stride() == (*self.scale_strides, 1)

    @property
    def format(self) -> str | None:
        return FORMATS.get(self.keys.dtype)

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Of block and head, alike for keys and values; (0, 0) without scales."""
        return self.key_scales.stride()[:2] if self.key_scales is not None else (0, 0)

    @property
    def pools(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """(keys, their scales), (values, their scales)."""
        return (self.keys, self.key_scales), (self.values, self.value_scales)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there is. The first dimension of each is the block; fp8 as its bytes, which PyTorch can copy anywhere."""
        stored = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(as_bytes(tensor) for tensor in stored if tensor is not None)


def as_bytes(tensor: Tensor) -> Tensor:
    """fp8 as int8 of the same bits; anything else as it is."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `dtype`, one of FORMATS, in the shape of x [..., head_dim], and scales [...] in fp32."""
    x = x.float()
    top = x.abs().amax(dim=-1)  # NaN where an element is
    # The divisor is a tensor: by a Python number, PyTorch multiplies with the reciprocal on CUDA, one rounding off the
    # IEEE division of the kernels and of the CPU.
    scales = top.clamp(min=MIN_ROW_MAX) / torch.full_like(top, MAX_CODE[dtype])
    scales = torch.where(top.isinf(), torch.nan, scales)
    codes = (x / scales[..., None]).nan_to_num_(nan=0.0)
    # Not clamped: what the division exceeds the largest code by, rounding takes away.
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


def dequantize(codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """codes [..., head_dim] times scales [...], written to `out`, which has the shape of codes."""
    if codes.dtype == torch.float8_e4m3fn:
        # The bits of e4m3 are those of a float16 256 times smaller, once its exponent has one more bit at the top.
        # PyTorch widens float16 several times as fast.
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        codes, scales = bits.view(torch.float16), scales * 256
    wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    wide.copy_(codes).mul_(scales[..., None])
    return out if wide is out else out.copy_(wide)
