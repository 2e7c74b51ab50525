"""What the readers of quantized checkpoints share: the description of a format, and packed integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.loading.quantized_blocks import Blocks

Parts = Mapping[str, Tensor]  # the stored tensors of a weight, by the end of their names


@dataclass(frozen=True)
class Layout:
    """How the tensors of a quantized weight are named in files, and how they are read."""

    marker: str  # end of the name of the tensor that every quantized weight has
    weight: str  # what the model's name has in its place
    parts: Sequence[str]  # ends of the names of the other tensors; a weight may lack some
    read: Callable[[Parts], Blocks]  # raises ValueError for tensors that are not of this format
    is_transposed: bool = False  # whether the model stores [..., in_features, out_features]


@dataclass(frozen=True)
class Format:
    """A format of quantized weights in safetensors files."""

    name: str  # for messages: "AWQ with 4 bits"
    layouts: Sequence[Layout]
    unused: Sequence[str] = ()  # ends of the names of tensors for quantized activations, which stay in the data type


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers [rows, 32 / bits * columns] in 32-bit integers [rows, columns], the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed[..., None] >> shifts).bitwise_and(2**bits - 1).flatten(-2).to(torch.int16)


def affine(codes: Tensor, scales: Tensor, zeros: Tensor | None, block_inputs: int, bits: int) -> Blocks:
    """Return the weight scale * (code - zero).

    Args:
        codes: [out_features, in_features] unsigned integers of `bits` bits.
        scales: [out_features, blocks].
        zeros: [out_features, blocks], or None for the middle of the range.
        block_inputs: number of inputs that share a scale.

    Raises ValueError for a number of inputs that the CPU kernels do not support.
    """
    if scales.shape != (len(codes), -(-codes.shape[1] // block_inputs)):
        raise ValueError(f"scales of shape {list(scales.shape)} for groups of {block_inputs} inputs")
    if block_inputs % 8:
        raise ValueError(f"groups of {block_inputs} inputs: must be a multiple of 8")
    middle, scales = 2 ** (bits - 1), scales.float()
    mins = None if zeros is None or (zeros == middle).all() else scales * (middle - zeros)
    return Blocks((codes - middle).to(torch.int8), scales, mins, block_inputs, bits)


def group_size(in_features: int, num_groups: int) -> int:
    """Return the number of inputs of a group, which for a single group is rounded up to a multiple of 8."""
    size = -(-in_features // num_groups)
    return -(-size // 8) * 8 if num_groups == 1 else size


def sort_inputs(codes: Tensor, g_idx: Tensor | None, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Sort the inputs [out_features, in_features] by group, so that each group is consecutive.

    Args:
        g_idx: [in_features], the group of each input; None: they are sorted.

    Returns the sorted codes, and the input of each column, or None if they were sorted. Raises ValueError if the groups
    have different sizes.
    """
    if g_idx is None:
        return codes, None
    if len(g_idx) != codes.shape[1]:
        raise ValueError(f"g_idx of {len(g_idx)} inputs for a weight of {codes.shape[1]}")
    order = g_idx.argsort(stable=True)
    size = -(-len(g_idx) // num_groups)
    if not torch.equal(g_idx[order].long(), torch.arange(len(g_idx)) // size):
        raise ValueError("g_idx has groups of different sizes")
    return (codes, None) if torch.equal(order, torch.arange(len(order))) else (codes[:, order], order)
