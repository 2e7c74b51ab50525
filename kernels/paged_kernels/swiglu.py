"""SwiGLU (arXiv:2002.05202) on the joint output of a gate and an up projection, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import launch
from paged_kernels.arguments import check_swiglu
from paged_kernels.launch import Device, Launch, device_of


@triton.jit
def swiglu_kernel(out, gate_up, stride_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (num_tokens, pieces of a row): one program takes one piece."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    row = gate_up + token * stride_gate_up + column
    gate = tl.load(row, mask=mask).to(tl.float32)
    up = tl.load(row + WIDTH, mask=mask)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + token * WIDTH + column, silu * up, mask=mask)


def plan_launch(out: Tensor, gate_up: Tensor, *, device: Device) -> Launch:
    num_tokens, width = out.shape
    row_tile = launch.row_tile(device, "swiglu", width=width, rows=num_tokens)
    arguments = dict(
        out=out, gate_up=gate_up, stride_gate_up=gate_up.stride(0),
        WIDTH=width, BLOCK=row_tile.elements, num_warps=row_tile.num_warps,
    )  # fmt: skip
    return Launch(swiglu_kernel, (num_tokens, triton.cdiv(width, row_tile.elements)), arguments)


def swiglu(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * width] -> [num_tokens, width]
    """silu(gate) * up of rows that hold the gate's elements, then the up projection's. silu is computed in fp32 and
    rounded to the rows' type before it is multiplied, as the layers of transformers do."""
    check_swiglu(gate_up)
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    plan_launch(out, gate_up, device=device_of(gate_up.device)).run()
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """What `swiglu` means; for tests, not for speed."""
    gate, up = gate_up.chunk(2, dim=1)
    return (gate.float() * gate.float().sigmoid()).to(up.dtype) * up
