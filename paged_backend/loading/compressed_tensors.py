"""Weights in the formats of compressed-tensors: packed and plain integers, and FP8.

    pack-quantized     weight_packed [out_features, in_features * bits / 32] int32, along the inputs, the first in the
                       lowest bits, as code + 2 ** (bits - 1); weight_shape; weight_scale [out_features, groups];
                       weight_zero_point [out_features * bits / 32, groups] int32, packed along the outputs;
                       weight_g_idx [in_features], the group of each input
    int-quantized      weight [out_features, in_features] int8; weight_scale; weight_zero_point
    float-quantized    weight float8_e4m3fn; weight_scale
    naive-quantized    either of the last two

A weight is scale * (code - zero point). Scales of activations are not used: activations stay in the data type of the
model. Source: https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/compressors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paged_backend.files.quantization_fields import config_groups
from paged_backend.loading import fp8
from paged_backend.loading.checkpoint_formats import (
    Format,
    Layout,
    Parts,
    affine,
    group_size,
    sort_inputs,
    unpack,
)
from paged_backend.loading.quantized_blocks import Blocks

UNUSED = tuple(f".{part}_{kind}" for part in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point"))


def compressed_tensors_format(settings: Mapping[str, Any]) -> Format:
    """Return the format."""
    weights = [group.get("weights") or {} for group in config_groups(settings).values()]
    block_size = next((group["block_structure"] for group in weights if group.get("block_structure") is not None), None)
    layouts = [
        Layout(
            ".weight_packed",
            ".weight",
            (".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
            read_packed,
        ),
        Layout(
            ".weight_scale", ".weight", (".weight", ".weight_zero_point"), partial(read_plain, block_size=block_size)
        ),
    ]
    return Format("compressed-tensors", layouts, UNUSED)


def read_packed(parts: Parts) -> Blocks:
    """Return the weight of integers that these tensors hold."""
    packed, scales = parts[".weight_packed"], parts[".weight_scale"]
    rows, columns = parts[".weight_shape"].tolist()
    bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == packed.shape[1]), None)
    if bits is None or packed.dtype != torch.int32 or len(packed) != rows:
        raise ValueError(f"{list(packed.shape)} elements of {packed.dtype} for a weight of shape {[rows, columns]}")
    zeros = parts.get(".weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack(zeros.T.contiguous(), bits)[:, :rows].T
    elif zeros is not None:
        zeros = zeros.to(torch.int16) + 2 ** (bits - 1)
    codes = unpack(packed, bits)[:, :columns]
    codes, order = sort_inputs(codes, parts.get(".weight_g_idx"), scales.shape[1])
    return affine(codes, scales, zeros, group_size(columns, scales.shape[1]), bits)._replace(order=order)


def read_plain(parts: Parts, block_size: tuple[int, int] | None) -> Blocks:
    """Return the weight of integers of 8 bits or FP8 that these tensors hold."""
    codes, zeros = parts[".weight"], parts.get(".weight_zero_point")
    if codes.dtype != torch.int8:
        if zeros is not None and zeros.float().any():
            raise ValueError("FP8 with zero points")
        return fp8.read(parts, ".weight_scale", block_size)
    scales, block_inputs = fp8.spread_scales(parts[".weight_scale"].float(), codes, block_size)
    mins = None
    if zeros is not None and zeros.any():
        mins = -scales * fp8.spread_scales(zeros.float(), codes, block_size)[0]
    return Blocks(codes, scales, mins, block_inputs, 8)
