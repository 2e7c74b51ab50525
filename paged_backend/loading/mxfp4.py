"""Weights of experts in MXFP4, as gpt-oss stores them.

    gate_up_proj_blocks, down_proj_blocks   [experts, out_features, blocks, 16] uint8
    gate_up_proj_scales, down_proj_scales   [experts, out_features, blocks] uint8

A block is 32 inputs in FP4 (e2m1), the even ones in the lower halves of the bytes, that share a power of two with an
exponent biased by 127 (e8m0). Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1;
https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paged_backend.loading.checkpoint_formats import Format, Layout, Parts
from paged_backend.loading.quantized_blocks import Blocks

BLOCK = 32  # inputs
NAN = 255  # exponent


def mxfp4_format(settings: Mapping[str, Any]) -> Format:
    """Return the format."""
    names = ("gate_up_proj", "down_proj")
    layouts = [
        Layout(f".{name}_blocks", f".{name}", (f".{name}_scales",), partial(read, name=name), is_transposed=True)
        for name in names
    ]
    return Format("MXFP4", layouts)


def read(parts: Parts, name: str) -> Blocks:
    """Return the weights [experts, out_features, in_features] that these tensors hold."""
    packed, exponents = parts[f".{name}_blocks"], parts[f".{name}_scales"]
    if packed.shape != (*exponents.shape, BLOCK // 2) or packed.dtype != torch.uint8:
        raise ValueError(f"blocks of shape {list(packed.shape)} with scales of shape {list(exponents.shape)}")
    if (exponents == NAN).any():
        raise ValueError("contains NaN")
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-3)
    scales = torch.exp2(exponents.float() - 127)
    return Blocks(codes, scales, None, BLOCK, 4)
