"""SwiGLU (arXiv:2002.05202) on the joint output of a gate and an up projection, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_swiglu
from paged_kernels.launch import Device, Launch, device_of
from paged_kernels.launch_table import row_tile


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


def plan_launch(out: Tensor, gate_up: Tensor, *, device: Device) -> Launch:
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
    plan_launch(out, gate_up, device=device_of(gate_up.device)).run()
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` in plain PyTorch. The definition for tests."""
    gate, up = gate_up.chunk(2, dim=1)
    return (gate.float() * gate.float().sigmoid()).to(up.dtype) * up
