"""Prepares the inputs of a step on the device: those of a captured step, and embeddings with angles, in a launch each.

A CUDA graph reads its inputs from fixed addresses. The tokens of the previous step are known on the device only, and
block tables have another width in every step, so both are completed here, in the graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import wait_for_previous
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import power_of_two

TILE = 256  # tokens, or entries of a block table, that a program processes at a time
EMBED_TILE = 1024  # elements of an embedding that a program copies


@triton.jit
def step_inputs_kernel(  # type: ignore[no-untyped-def]
    out, tokens, previous, tables, packed_tables, table_width, context_lens, num_tokens, num_seqs, stride_table,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Complete one tile of tokens and the table of one sequence. Grid: (max(tiles of tokens, num_seqs),)."""
    program = tl.program_id(0)
    entry = tl.arange(0, TILE)
    place = program * TILE + entry
    token = tl.load(tokens + place, mask=place < num_tokens, other=0)
    sampled = tl.load(previous + (-1 - token), mask=token < 0, other=0)
    tl.store(out + place, tl.where(token < 0, tl.maximum(sampled, 0), token), mask=place < num_tokens)
    if program < num_seqs:
        width = tl.load(table_width)
        used = tl.cdiv(tl.load(context_lens + program), BLOCK_SIZE)
        for start in range(0, used, TILE):
            column = start + entry
            block = tl.load(packed_tables + program * width + column, mask=column < used)
            tl.store(tables + program.to(tl.int64) * stride_table + column, block, mask=column < used)


def plan_launch(
    out: Tensor,
    tokens: Tensor,
    previous: Tensor,
    tables: Tensor,
    packed_tables: Tensor,
    table_width: Tensor,
    context_lens: Tensor,
    block_size: int,
) -> Launch:
    """Return the launch of one call."""
    num_tokens, num_seqs = tokens.numel(), len(context_lens)
    arguments = dict(
        out=out, tokens=tokens, previous=previous, tables=tables, packed_tables=packed_tables, table_width=table_width,
        context_lens=context_lens, num_tokens=num_tokens, num_seqs=num_seqs, stride_table=tables.stride(0),
        BLOCK_SIZE=block_size, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return Launch(step_inputs_kernel, (max(triton.cdiv(num_tokens, TILE), num_seqs),), arguments)


def step_inputs(
    tokens: Tensor,  # [1, num_tokens] int64; -1 - i is a placeholder for entry i of previous
    previous: Tensor,  # [num_sampled] int64; a negative entry counts as token 0
    tables: Tensor,  # [num_seqs, max_blocks] int32
    packed_tables: Tensor,  # [at least num_seqs * width] int32: the rows of the tables, one after the other
    table_width: Tensor,  # [1] int32: entries of each of these rows
    context_lens: Tensor,  # [num_seqs] int32
    *,
    block_size: int,
) -> Tensor:  # [1, num_tokens] int64
    """Return the tokens with placeholders replaced, and write the used entries of the packed tables to `tables`."""
    out = torch.empty_like(tokens)
    plan_launch(out, tokens, previous, tables, packed_tables, table_width, context_lens, block_size).run()
    return out


def step_inputs_reference(
    tokens: Tensor,
    previous: Tensor,
    tables: Tensor,
    packed_tables: Tensor,
    table_width: Tensor,
    context_lens: Tensor,
    *,
    block_size: int,
) -> Tensor:
    """Compute `step_inputs` one entry at a time. The definition for tests."""
    width = int(table_width)
    for seq, context_len in enumerate(context_lens.tolist()):
        used = -(-context_len // block_size)
        tables[seq, :used] = packed_tables[seq * width : seq * width + used]
    resolved = [token if token >= 0 else max(int(previous[-1 - token]), 0) for token in tokens[0].tolist()]
    return torch.tensor([resolved], dtype=tokens.dtype, device=tokens.device)


# --- embeddings and angles --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["ids", "positions"])
def embed_kernel(  # type: ignore[no-untyped-def]
    out, angles, ids, positions, weight, table, stride_weight, stride_table,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK_W: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy a tile of a token's embedding, or its angles. Grid: (num_tokens, tiles of an embedding + 1)."""
    wait_for_previous(DEPENDENT)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tile < tl.num_programs(1) - 1:
        column = tile * TILE + tl.arange(0, TILE)
        row = weight + tl.load(ids + token) * stride_weight
        tl.store(out + token * HIDDEN + column, tl.load(row + column, mask=column < HIDDEN), mask=column < HIDDEN)
    else:
        angle = tl.arange(0, BLOCK_W)
        place = table + tl.load(positions + token) * stride_table
        tl.store(angles + token * WIDTH + angle, tl.load(place + angle, mask=angle < WIDTH), mask=angle < WIDTH)


def plan_embed(
    out: Tensor, angles: Tensor, ids: Tensor, positions: Tensor, weight: Tensor, table: Tensor, *, device: Device
) -> Launch:
    """Return the launch that writes `out` and `angles`."""
    (num_tokens, hidden), width = out.shape, angles.shape[1]
    tile = min(EMBED_TILE, power_of_two(hidden))
    arguments = dict(
        out=out, angles=angles, ids=ids, positions=positions, weight=weight, table=table,
        stride_weight=weight.stride(0), stride_table=table.stride(0),
        HIDDEN=hidden, WIDTH=width, TILE=tile, BLOCK_W=power_of_two(width), num_warps=4, **device.dependence,
    )  # fmt: skip
    return Launch(embed_kernel, (num_tokens, triton.cdiv(hidden, tile) + 1), arguments)


def embed(
    ids: Tensor,  # [num_tokens] int64
    positions: Tensor,  # [num_tokens] int64
    weight: Tensor,  # [vocab, hidden]
    table: Tensor,  # [num_positions, width] of any float type
) -> tuple[Tensor, Tensor]:
    """Return the rows of `weight` for ids [num_tokens, hidden], and those of `table` for positions [num_tokens, width].

    ids and positions are within the tables.
    """
    out = torch.empty((len(ids), weight.shape[1]), dtype=weight.dtype, device=weight.device)
    angles = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
    if len(ids):
        plan_embed(out, angles, ids, positions, weight, table, device=device_of(ids.device)).run()
    return out, angles


def embed_reference(ids: Tensor, positions: Tensor, weight: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `embed` one row at a time. The definition for tests."""
    rows = [weight[token] for token in ids.tolist()], [table[position] for position in positions.tolist()]
    return torch.stack(rows[0]), torch.stack(rows[1])
