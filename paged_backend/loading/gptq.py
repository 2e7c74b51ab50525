"""Weights in the format of GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel store them.

    qweight   [in_features * bits / 32, out_features] int32   codes, along the inputs
    qzeros    [groups, out_features * bits / 32] int32        zero points, along the outputs
    scales    [groups, out_features] float16
    g_idx     [in_features] int32                             the group of each input

32 bits hold consecutive values, the first in the lowest bits. A weight is scale * (code - zero). `checkpoint_format`
"gptq" stores zero points minus 1, "gptq_v2" as they are. With `desc_act`, the inputs of a group are not consecutive.
Source: https://github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

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


def gptq_format(settings: Mapping[str, Any]) -> Format:
    """Return the format."""
    zeros_minus_1 = settings.get("checkpoint_format", "gptq") == "gptq"
    layout = Layout(
        ".qweight", ".weight", (".qzeros", ".scales", ".g_idx"),
        partial(read, bits=settings["bits"], zeros_minus_1=zeros_minus_1),
    )  # fmt: skip
    return Format("GPTQ", [layout])


def read(parts: Parts, bits: int, zeros_minus_1: bool) -> Blocks:
    """Return the weight that these tensors hold."""
    codes = unpack(parts[".qweight"].T.contiguous(), bits)
    scales, zeros = parts[".scales"].T, unpack(parts[".qzeros"], bits).T
    if zeros_minus_1:
        zeros = zeros + 1
    codes, order = sort_inputs(codes, parts.get(".g_idx"), scales.shape[1])
    return affine(codes, scales, zeros, group_size(codes.shape[1], scales.shape[1]), bits)._replace(order=order)
