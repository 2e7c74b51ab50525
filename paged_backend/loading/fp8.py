"""Weights in FP8 (e4m3fn), with a scale for the whole weight, each output, or each block of a weight.

    weight              [out_features, in_features] float8_e4m3fn
    weight_scale_inv    [rows of blocks, columns of blocks], the factor of each block (DeepSeek-V3, Qwen3 FP8)
    weight_scale        one value, or [out_features, 1]

A weight is scale * code. Sources: https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py (`weight_dequant`);
transformers, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paged_backend.loading.checkpoint_formats import Format, Layout, Parts
from paged_backend.loading.quantized_blocks import Blocks

ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub")


def fp8_format(settings: Mapping[str, Any]) -> Format:
    """Return the format."""
    size = settings.get("weight_block_size")
    layouts = [layout(".weight_scale_inv", size), layout(".weight_scale", size)]
    return Format("FP8", layouts, ACTIVATION_SCALES)


def layout(scale: str, block_size: tuple[int, int] | None) -> Layout:
    """Return the layout of weights whose scales have this name."""
    return Layout(scale, ".weight", (".weight",), partial(read, scale_name=scale, block_size=block_size))


def read(parts: Parts, scale_name: str, block_size: tuple[int, int] | None) -> Blocks:
    """Return the weight that these tensors hold."""
    codes = parts[".weight"]
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise ValueError(f"has dtype {codes.dtype} and {codes.dim()} dimensions; must be float8_e4m3fn with 2")
    if (codes.view(torch.uint8) & 127 == 127).any():
        raise ValueError("contains NaN")
    scales, block_inputs = spread_scales(parts[scale_name].float(), codes, block_size)
    return Blocks(codes, scales, None, block_inputs, 8)


def spread_scales(scales: Tensor, codes: Tensor, block_size: tuple[int, int] | None) -> tuple[Tensor, int]:
    """Return the scales [out_features, blocks] of a weight, and the number of inputs of a block.

    Args:
        scales: one value, [out_features], [out_features, blocks], or [rows of blocks, blocks].
        codes: [out_features, in_features].
        block_size: outputs and inputs that share a scale, if both are more than one.

    Raises ValueError if they are not the scales of this weight.
    """
    rows, columns = codes.shape
    whole = -(-columns // 8) * 8
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1).contiguous(), whole
    if scales.dim() == 1 and len(scales) == rows:
        scales = scales[:, None]
    if scales.dim() == 2 and block_size and scales.shape == (-(-rows // block_size[0]), -(-columns // block_size[1])):
        return scales.repeat_interleave(block_size[0], 0)[:rows].contiguous(), block_size[1]
    if scales.dim() == 2 and len(scales) == rows and columns % scales.shape[1] == 0:
        size = whole if scales.shape[1] == 1 else columns // scales.shape[1]
        if size % 8 == 0:
            return scales.contiguous(), size
    raise ValueError(f"scales of shape {list(scales.shape)} for a weight of shape {[rows, columns]}")
