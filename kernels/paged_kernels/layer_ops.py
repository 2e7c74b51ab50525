"""Operations between attention calls: RMSNorm and SwiGLU, each in one launch, and two kinds of linear layers.

`few_rows_linear` computes a layer over few rows in one launch, with the operations before and after it:

    total = x + residual;  y = rms_norm(total) @ weight.T + bias;  y = silu(y[:, :width]) * y[:, width:]

Every part but the product is optional. With few rows, reading the weight takes the time, so every program reads its
own part of it once, and computes sums of squares for the norm beside the product: the norm divides a whole row by one
number, which can be done afterwards. If there are too few tiles of outputs to fill the device, several programs split
the inputs, and the last of them to finish adds their results.

The results of `invariant_linear` for a row do not depend on the number of rows: the tile of outputs, the inputs per
step and the multiply instruction are the same for any number of rows, and no inputs are split between programs, so
every sum adds its inputs in the same order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import prefetch_rows, wait_for_previous
from paged_kernels.launch import Device, Launch, device_of, zeros
from paged_kernels.launch_table import power_of_two, row_tile

MAX_TILE_ROWS = 64  # more rows take several tiles, which read the weight again
MAX_SPLITS = 8
MIN_SPLIT_STEPS = 4  # minimum steps of a split; with fewer, loads do not overlap
PREFETCHED_BYTES = 2048  # of each row of the weight, which a program prefetches while the previous launch ends
WAVES = 2  # programs per multiprocessor up to which inputs are split
MANY_ROWS = 64  # more rows take tiles of twice the height, if these are multiplied with the same instruction
WIDE_TILES = ("sm_8", "sm_9", "sm_12")  # chips whose instructions, of 16 and 64 rows, do not grow with the tile
SHARED_WEIGHT = 8  # tiles of rows whose programs run together, so that they find the weight in the L2 cache

# --- residual addition and RMSNorm (arXiv:1910.07467) -----------------------------------------------------------------


@triton.jit
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    normed, total, x, residual, weight, eps, stride_x, stride_residual,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add and normalize one row. Grid: (num_tokens,). Without a residual, `total` is not written."""
    wait_for_previous(DEPENDENT)
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
        HIDDEN=hidden, BLOCK=tile.elements, num_warps=tile.num_warps, **device.dependence,
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
def swiglu_kernel(  # type: ignore[no-untyped-def]
    out, gate_up, stride_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Compute one tile of one row. Grid: (num_tokens, tiles of a row)."""
    wait_for_previous(DEPENDENT)
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
        WIDTH=width, BLOCK=tile.elements, num_warps=tile.num_warps, **device.dependence,
    )  # fmt: skip
    return Launch(swiglu_kernel, (num_tokens, triton.cdiv(width, tile.elements)), arguments)


def swiglu(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * width] -> [num_tokens, width]
    """Return silu(gate) * up for rows that hold the gate's elements followed by the up projection's.

    silu is computed in fp32 and rounded to the type of the rows before the multiplication, as in the layers of
    transformers.
    """
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    plan_swiglu(out, gate_up, device=device_of(gate_up.device)).run()
    return out


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` in plain PyTorch. The definition for tests."""
    gate, up = gate_up.chunk(2, dim=1)
    return (gate.float() * gate.float().sigmoid()).to(up.dtype) * up


# --- linear layers over few rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FewRowsShape:
    """The tiles of a launch."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    n_tiles: int
    stages: int


def _few_rows_shape(
    num_rows: int, inputs: int, outputs: int, itemsize: int, device: Device, *, swiglu: bool
) -> _FewRowsShape:
    block_m = min(MAX_TILE_ROWS, max(16, power_of_two(num_rows)))
    block_n = 16 if swiglu else 32  # a tile of outputs of SwiGLU reads two tiles of the weight
    block_k = 64 if itemsize == 4 else 128
    n_tiles = triton.cdiv(outputs, block_n)
    steps = triton.cdiv(inputs, block_k)
    splits = min(MAX_SPLITS, WAVES * device.multiprocessors // n_tiles, steps // MIN_SPLIT_STEPS)
    stages = 4 if block_m == 16 and itemsize == 2 else 2
    if device.chip.startswith("gfx") and block_m > 16:  # 64 KiB of shared memory
        stages = 1
    return _FewRowsShape(block_m, block_n, block_k, max(1, splits), n_tiles, stages)


@triton.jit
def is_last(arrivals, count):  # type: ignore[no-untyped-def]
    """Return whether `count` programs, including this one, have stored their results.

    The last one resets the counter for the next launch, and sees what the others have stored if its loads bypass the
    L1 cache.
    """
    tl.debug_barrier()  # all threads of the program have stored
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _load_weight(weight, n, k, stride_weight, mask):  # type: ignore[no-untyped-def]
    """Load a tile [BLOCK_K, BLOCK_N] of the transposed weight."""
    return tl.load(weight + n.to(tl.int64)[None, :] * stride_weight + k[:, None], mask=mask, other=0.0)


@triton.jit
def _sum_splits(partials, place, mask, stride_split, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the partials of all splits in order. The loads bypass the L1 cache: other programs have written them."""
    total = tl.load(partials + place, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + place + split * stride_split, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_rows", "stride_split"])
def few_rows_linear_kernel(  # type: ignore[no-untyped-def]
    out, total, x, residual, norm, weight, bias, partials, squares, arrivals, num_rows, eps,
    stride_x, stride_residual, stride_weight, stride_split,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SWIGLU: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr, PREFETCHED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs, or one split of its inputs. Grid: (tiles of outputs, SPLITS, tiles of rows).

    partials [SPLITS, num_rows, OUTPUTS or 2 * OUTPUTS] and squares [SPLITS, num_rows]: results of each split. arrivals
    [tiles of rows * tiles of outputs]: finished splits; zero before and after.
    """
    SPLIT: tl.constexpr = ((INPUTS + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    WIDTH: tl.constexpr = 2 * OUTPUTS if SWIGLU else OUTPUTS
    n_tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = m.to(tl.int64)[:, None]
    is_row, is_output = m < num_rows, n < OUTPUTS
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    square = tl.zeros([BLOCK_M], dtype=tl.float32)
    begin = split * SPLIT
    if DEPENDENT:
        end = tl.minimum(begin + SPLIT, INPUTS)
        ITEMSIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(weight, tl.where(is_output, n, -1), stride_weight, begin, end, ITEMSIZE, PREFETCHED)
        if SWIGLU:
            prefetch_rows(weight, tl.where(is_output, n + OUTPUTS, -1), stride_weight, begin, end, ITEMSIZE, PREFETCHED)
    wait_for_previous(DEPENDENT)
    for start in tl.range(begin, tl.minimum(begin + SPLIT, INPUTS), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] & (k < INPUTS)[None, :]
        a = tl.load(x + row * stride_x + k[None, :], mask=mask, other=0.0)
        if residual is not None:
            wide = a.to(tl.float32) + tl.load(residual + row * stride_residual + k[None, :], mask=mask, other=0.0)
            a = wide.to(a.dtype)
            tl.store(total + row * INPUTS + k[None, :], a, mask=mask & (n_tile == 0))
        if norm is not None:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            a = (wide * tl.load(norm + k, mask=k < INPUTS, other=0.0)[None, :]).to(a.dtype)
        w_mask = (k < INPUTS)[:, None] & is_output[None, :]
        acc = tl.dot(a, _load_weight(weight, n, k, stride_weight, w_mask), acc, input_precision=PRECISION)
        if SWIGLU:
            up = tl.dot(a, _load_weight(weight, n + OUTPUTS, k, stride_weight, w_mask), up, input_precision=PRECISION)

    o_mask = is_row[:, None] & is_output[None, :]
    is_finished = True
    if SPLITS > 1:
        place = row * WIDTH + n[None, :]
        tl.store(partials + split * stride_split + place, acc, mask=o_mask)
        if SWIGLU:
            tl.store(partials + split * stride_split + place + OUTPUTS, up, mask=o_mask)
        if norm is not None:
            tl.store(squares + split * num_rows + m, square, mask=is_row)
        is_finished = is_last(arrivals + m_tile * tl.num_programs(0) + n_tile, SPLITS)
        if is_finished:
            acc = _sum_splits(partials, place, o_mask, stride_split, SPLITS)
            if SWIGLU:
                up = _sum_splits(partials, place + OUTPUTS, o_mask, stride_split, SPLITS)
            if norm is not None:
                square = _sum_splits(squares, m, is_row, num_rows, SPLITS)
    if is_finished:
        if norm is not None:
            scale = tl.rsqrt(square / INPUTS + eps)[:, None]
            acc *= scale
            up *= scale
        if bias is not None:
            acc += tl.load(bias + n, mask=is_output, other=0.0)[None, :]
            if SWIGLU:
                up += tl.load(bias + OUTPUTS + n, mask=is_output, other=0.0)[None, :]
        y = acc.to(out.dtype.element_ty)
        if SWIGLU:  # with the roundings of `swiglu`
            gate = y.to(tl.float32)
            y = (gate / (1.0 + tl.exp(-gate))).to(y.dtype) * up.to(y.dtype)
        tl.store(out + row * OUTPUTS + n[None, :], y, mask=o_mask)


def plan_few_rows_linear(
    out: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    swiglu: bool,
    device: Device,
) -> Launch:
    """Return the launch that writes `out`, and the sum of x and residual to `total`."""
    (num_rows, inputs), outputs = x.shape, out.shape[1]
    shape = _few_rows_shape(num_rows, inputs, outputs, x.element_size(), device, swiglu=swiglu)
    m_tiles, width = triton.cdiv(num_rows, shape.block_m), len(weight)
    partials = squares = arrivals = None
    if shape.splits > 1:
        partials = torch.empty((shape.splits, num_rows, width), dtype=torch.float32, device=x.device)
        squares = torch.empty((shape.splits, num_rows), dtype=torch.float32, device=x.device)
        arrivals = zeros(m_tiles * shape.n_tiles, x.device)
    arguments = dict(
        out=out, total=total, x=x, residual=residual, norm=norm, weight=weight, bias=bias, partials=partials,
        squares=squares, arrivals=arrivals, num_rows=num_rows, eps=eps, stride_x=x.stride(0),
        stride_residual=residual.stride(0) if residual is not None else 0, stride_weight=weight.stride(0),
        stride_split=num_rows * width, INPUTS=inputs, OUTPUTS=outputs, SWIGLU=swiglu, SPLITS=shape.splits,
        BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k, STAGES=shape.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
        PREFETCHED=PREFETCHED_BYTES // x.element_size(), **device.dependence,
    )  # fmt: skip
    return Launch(few_rows_linear_kernel, (shape.n_tiles, shape.splits, m_tiles), arguments)


def few_rows_linear(
    x: Tensor,  # [num_rows, inputs]
    weight: Tensor,  # [outputs, inputs], or with swiglu [2 * outputs, inputs]: gate and up projection
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,  # shape and type of x
    norm: Tensor | None = None,  # [inputs]: weight of an RMSNorm (arXiv:1910.07467)
    eps: float = 0.0,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [num_rows, outputs], and x + residual.

    Without a residual the second is x itself. The sum is rounded to the type of x, and so is its product with the
    norm's weight; everything up to the bias is computed in fp32. Unlike `add_rms_norm`, rows are divided by their norm
    after the product, so in fp16 the product of a sum and the norm's weight may overflow.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    outputs = len(weight) // 2 if swiglu else len(weight)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        device = device_of(x.device)
        plan_few_rows_linear(out, total, x, residual, norm, eps, weight, bias, swiglu=swiglu, device=device).run()
    return out, x if total is None else total


def few_rows_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `few_rows_linear` in plain PyTorch. The definition for tests."""
    total = x if residual is None else x + residual
    rows = total.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps) * norm.float()
    y = rows @ weight.float().T
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return swiglu_reference(y) if swiglu else y, total


# --- linear layers over any number of rows in one order ---------------------------------------------------------------


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


def plan_invariant_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, device: Device) -> Launch:
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
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    if out.numel():
        plan_invariant_linear(out, x, weight, bias, device=device_of(x.device)).run()
    return out


def invariant_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `invariant_linear` in plain PyTorch. The definition for tests."""
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)
