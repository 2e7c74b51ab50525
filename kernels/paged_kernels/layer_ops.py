"""Operations between the linear layers of a decoder layer, each in one launch: RMSNorm and SwiGLU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_add_rms_norm, check_swiglu
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import row_tile

# --- residual addition and RMSNorm (arXiv:1910.07467) -----------------------------------------------------------------


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    normed, total, x, residual, weight, eps, stride_x, stride_residual,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add and normalize one row. Grid: (num_tokens,). Without a residual, `total` is not written."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    row = tl.load(x + token * stride_x + column, mask=mask, other=0.0)
    if residual is not None:
        added = row.to(tl.float32) + tl.load(residual + token * stride_residual + column, mask=mask, other=0.0)
        row = added.to(row.dtype)
        tl.store(total + token * HIDDEN + column, row, mask=mask)
    wide = row.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    result = scaled.to(row.dtype) * tl.load(weight + column, mask=mask)
    tl.store(normed + token * HIDDEN + column, result, mask=mask)


def plan_add_rms_norm(
    normed: Tensor, total: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, device: Device
) -> Launch:
    """Return the launch that writes `normed` and `total`."""
    num_tokens, hidden = x.shape
    tile = row_tile(device.chip, "add_rms_norm", width=hidden, rows=num_tokens)
    arguments = dict(
        normed=normed, total=total, x=x, residual=residual, weight=weight, eps=eps,
        stride_x=x.stride(0), stride_residual=residual.stride(0) if residual is not None else 0,
        HIDDEN=hidden, BLOCK=tile.elements, num_warps=tile.num_warps,
    )  # fmt: skip
    return Launch(add_rms_norm_kernel, (num_tokens,), arguments)


def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor | None,  # shape and type of x
    weight: Tensor,  # [hidden], type of x
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (normalized rows, x + residual), both in the shape and type of x.

    Both are new tensors, but without a residual the second is x itself. The sum is rounded to x's type before it is
    normalized, and the normalized row before it is multiplied by the weight, as in the layers of transformers; the
    arithmetic in between is fp32.
    """
    check_add_rms_norm(x, residual, weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    plan_add_rms_norm(normed, total, x, residual, weight, eps, device=device_of(x.device)).run()
    return normed, total


def add_rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `add_rms_norm` one row at a time. The definition for tests; slow."""
    total = x if residual is None else x + residual
    rows = [row.float() / (row.float().square().mean() + eps).sqrt() for row in total]
    normed = [row.to(x.dtype) * weight for row in rows]
    return torch.stack(normed) if normed else torch.empty_like(x), total


# --- SwiGLU (arXiv:2002.05202) ----------------------------------------------------------------------------------------


@triton.jit
def swiglu_kernel(out, gate_up, stride_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one tile of one row. Grid: (num_tokens, tiles of a row)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    row = gate_up + token * stride_gate_up + column
    gate = tl.load(row, mask=mask).to(tl.float32)
    up = tl.load(row + WIDTH, mask=mask)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + token * WIDTH + column, silu * up, mask=mask)


def plan_swiglu(out: Tensor, gate_up: Tensor, *, device: Device) -> Launch:
    """Return the launch that writes `out`."""
    num_tokens, width = out.shape
    tile = row_tile(device.chip, "swiglu", width=width, rows=num_tokens)
    arguments = dict(
        out=out, gate_up=gate_up, stride_gate_up=gate_up.stride(0),
        WIDTH=width, BLOCK=tile.elements, num_warps=tile.num_warps,
    )  # fmt: skip
    return Launch(swiglu_kernel, (num_tokens, triton.cdiv(width, tile.elements)), arguments)


def swiglu(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * width] -> [num_tokens, width]
    """Return silu(gate) * up for rows that hold the gate's elements followed by the up projection's.

    silu is computed in fp32 and rounded to the type of the rows before the multiplication, as in the layers of
    transformers.
    """
    check_swiglu(gate_up)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    plan_swiglu(out, gate_up, device=device_of(gate_up.device)).run()
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` in plain PyTorch. The definition for tests."""
    gate, up = gate_up.chunk(2, dim=1)
    return (gate.float() * gate.float().sigmoid()).to(up.dtype) * up
