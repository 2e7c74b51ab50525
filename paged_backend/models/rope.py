"""Rotary embeddings: up to which length their angles are constant, and tables of the angles for fused layers.

Two of transformers' rope types are length-dependent. "dynamic" (NTK) scales the angles of every position once the
longest sequence of a forward pass exceeds `max_position_embeddings`, and "longrope" (https://arxiv.org/abs/2402.13753)
switches to other factors beyond `original_max_position_embeddings`. Neither works with paged attention: a step contains
sequences of different lengths, and cached keys would have to be rotated again when a sequence crosses the threshold.
Below the threshold the angles are constant, so it limits the context length of such a model.

As the angles of a position never change, fused layers gather one row of a table per token, in one operation instead of
the nine that compute sines and cosines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

MAX_BYTES = 1 << 27  # 2**20 positions of 32 pairs, or 131,072 of 128, in 16 bits
CHUNK = 4096  # positions of a table that are computed at a time
LENGTH_DEPENDENT = ("dynamic", "longrope")

Angles: TypeAlias = "tuple[Tensor, Tensor]"  # cosines and sines, [batch, num_tokens, head_dim]


def parameters(text_config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return all rope parameters of a model. Some models have separate ones for each layer type."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def max_static_len(text_config: PretrainedConfig) -> tuple[int | None, str]:
    """Return the length up to which the angles of all positions are constant, and the reason for the limit.

    The length is None if the model's configuration has no limit.
    """
    limit, reason = getattr(text_config, "max_position_embeddings", None), "the model's own limit"
    for rope in parameters(text_config):
        kind = rope.get("rope_type")
        if kind in LENGTH_DEPENDENT and limit is not None:
            original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
            limit = min(limit, original or limit)
            reason = f'beyond which rope type "{kind}" changes the angles of all positions'
    return limit, reason


def freeze_rope(model: PreTrainedModel) -> None:
    """Use the static angles of lengths up to `max_static_len`, without inspecting the positions.

    Inspecting them would synchronize with the device in every step, which also prevents CUDA graph capture.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in LENGTH_DEPENDENT:
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {key: "default" if value in LENGTH_DEPENDENT else value for key, value in kind.items()}


class RotaryTable:
    """A rotary embedding with a table [positions, 2 * head_dim]: cosines, then sines."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, x: Tensor, position_ids: Tensor) -> Angles:
        """Return cosines and sines [*position_ids.shape, head_dim]."""
        cos, sin = F.embedding(position_ids, self.table).chunk(2, dim=-1)
        return cos, sin


class ConvertedAngles:
    """A rotary embedding that returns angles in another form than the kernels take."""

    def __init__(self, module: nn.Module, convert: Callable[[Any], Angles]) -> None:
        self._module, self._convert = module, convert

    def __call__(self, x: Tensor, position_ids: Tensor) -> Angles:
        """Return cosines and sines [*position_ids.shape, head_dim]."""
        return self._convert(type(self._module).forward(self._module, x, position_ids))


def for_both_halves(angles: Angles) -> Angles:
    """Return the angles of one half of a head [..., head_dim / 2] for both of its halves."""
    cos, sin = angles
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def of_complex(rotations: Tensor) -> Angles:
    """Return the angles of complex numbers of absolute value 1, [..., head_dim / 2], for both halves of a head."""
    return for_both_halves((rotations.real, rotations.imag))


class Rotation(NamedTuple):
    """The order of elements that are rotated together: pairs, at 2i and 2i + 1, or halves, at i and i + size / 2."""

    from_pairs: bool
    to_pairs: bool


def look_up_angles(
    rotary: nn.Module, positions: int | None, x: Tensor, convert: Callable[[Any], Angles] | None
) -> Callable[[Tensor, Tensor], Angles]:
    """Return a function like a rotary embedding that looks its angles up, if the table is not too large.

    Args:
        rotary: an unmodified rotary embedding of transformers.
        positions: the number of positions; None: unknown, so there is no table.
        x: a tensor of the type and device of the hidden states.
        convert: returns what the rotary embedding returns as angles; None: it returns angles.
    """
    angles = ConvertedAngles(rotary, convert) if convert else rotary
    return (None if positions is None else rotary_table(angles, positions, x)) or angles


@torch.no_grad()
def rotary_table(module: Callable[[Tensor, Tensor], Angles], positions: int, x: Tensor) -> RotaryTable | None:
    """Return a table of what a rotary embedding computes, or None if it would exceed MAX_BYTES.

    Args:
        module: a rotary embedding of transformers, or a function with its arguments x and position ids.
        positions: the number of positions, from 0 on.
        x: a tensor of the type and device of the hidden states.
    """

    def rows(ids: Tensor) -> Tensor:  # [len(ids), 2 * head_dim]
        return torch.cat(module(x, ids[None]), dim=-1)[0]

    ids = torch.arange(positions, device=x.device)
    first = rows(ids[:1])
    if positions * first.nbytes > MAX_BYTES:
        return None
    table = first.new_empty(positions, first.shape[1])
    for part, chunk in zip(table.split(CHUNK), ids.split(CHUNK), strict=True):
        part.copy_(rows(chunk))
    return RotaryTable(table)
