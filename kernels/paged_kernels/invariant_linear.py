"""A linear layer whose results for a row do not depend on the number of rows.

The tile of outputs, the inputs per step and the multiply instruction are the same for any number of rows, and no inputs
are split between programs, so every sum adds its inputs in the same order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.arguments import check_invariant_linear
from paged_kernels.launch import Device, Launch, device_of

MANY_ROWS = 64  # more rows take tiles of twice the height, if these are multiplied with the same instruction
WIDE_TILES = ("sm_8", "sm_9", "sm_12")  # chips whose instructions, of 16 and 64 rows, do not grow with the tile
SHARED_WEIGHT = 8  # tiles of rows whose programs run together, so that they find the weight in the L2 cache


@dataclass(frozen=True)
class LinearTile:
    """The part of a product that one program computes."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs of a step
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, outputs: int, itemsize: int, device: Device) -> LinearTile:
    """Return the tile of a weight. The number of rows affects its height only."""
    many = num_rows > MANY_ROWS and device.chip.startswith(WIDE_TILES)
    if itemsize == 4:  # multiplied in registers
        return LinearTile(64 if many else 16, 32, 32, 4, 2)
    block_n = 128 if outputs >= 128 * device.multiprocessors else 64
    stages = 1 if device.chip.startswith("gfx") else 3 if many and block_n == 128 else 4
    warps = 8 if many or device.chip == "sm_100" else 4  # with 4, that chip spills registers
    return LinearTile(128 if many else 64, block_n, 64, warps, stages)


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear_kernel(  # type: ignore[no-untyped-def]
    out, x, weight, bias, num_rows, stride_x, stride_weight_n, stride_weight_k,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SHARED_WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs. Grid: (tiles of rows * tiles of outputs,)."""
    N_TILES: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = program // (SHARED_WEIGHT * N_TILES) * SHARED_WEIGHT
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first, SHARED_WEIGHT)
    within = program % (SHARED_WEIGHT * N_TILES)
    m = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = m < num_rows, n < OUTPUTS
    rows = x + m.to(tl.int64)[:, None] * stride_x
    columns = weight + n.to(tl.int64)[None, :] * stride_weight_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < INPUTS
        a = tl.load(rows + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        b = tl.load(columns + k[:, None] * stride_weight_k, mask=is_input[:, None] & is_output[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if bias is not None:
        acc += tl.load(bias + n, mask=is_output, other=0.0)[None, :]
    place = m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def plan_launch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, device: Device) -> Launch:
    """Return the launch that writes `out`."""
    (num_rows, inputs), outputs = x.shape, len(weight)
    tile = tile_of(num_rows, outputs, x.element_size(), device)
    arguments = dict(
        out=out, x=x, weight=weight, bias=bias, num_rows=num_rows, stride_x=x.stride(0),
        stride_weight_n=weight.stride(0), stride_weight_k=weight.stride(1), INPUTS=inputs, OUTPUTS=outputs,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        SHARED_WEIGHT=SHARED_WEIGHT, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
    )  # fmt: skip
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(outputs, tile.block_n),)
    return Launch(invariant_linear_kernel, grid, arguments)


def invariant_linear(
    x: Tensor,  # [num_rows, inputs]
    weight: Tensor,  # [outputs, inputs] of x's type, of any strides
    bias: Tensor | None = None,  # [outputs]
) -> Tensor:  # [num_rows, outputs]
    """Compute `x @ weight.T + bias`, in fp32 up to the result. The bits of a row do not depend on the other rows."""
    check_invariant_linear(x, weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if out.numel():
        plan_launch(out, x, weight, bias, device=device_of(x.device)).run()
    return out


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `invariant_linear` in plain PyTorch. The definition for tests."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)
