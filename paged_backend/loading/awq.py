"""Weights in the format of AWQ (Lin et al. 2023), as AutoAWQ stores them in its version "gemm".

    qweight   [in_features, out_features / 8] int32   codes of 4 bits, along the outputs
    qzeros    [groups, out_features / 8] int32        the same for zero points
    scales    [groups, out_features] float16

Eight consecutive outputs are in 32 bits, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on. A weight is
scale * (code - zero). Source: https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paged_backend.loading.checkpoint_formats import Format, Layout, Parts, affine, group_size, unpack
from paged_backend.loading.quantized_blocks import Blocks

POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # position of each of eight outputs in 32 bits


def awq_format(settings: Mapping[str, Any]) -> Format:
    """Return the format."""
    return Format("AWQ", [Layout(".qweight", ".weight", (".qzeros", ".scales"), read)])


def read(parts: Parts) -> Blocks:
    """Return the weight that these tensors hold."""
    codes, zeros, scales = _outputs(parts[".qweight"]), _outputs(parts[".qzeros"]), parts[".scales"].T
    return affine(codes, scales, zeros, group_size(codes.shape[1], scales.shape[1]), 4)


def _outputs(packed: Tensor) -> Tensor:
    """Unpack [rows, out_features / 8]: [out_features, rows]."""
    return unpack(packed, 4).unflatten(1, (-1, 8))[..., POSITIONS].flatten(1).T
