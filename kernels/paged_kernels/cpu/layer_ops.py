"""RMSNorm, SwiGLU, and linear layers with both, in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from paged_kernels.arguments import (
    check_add_rms_norm,
    check_few_rows_linear,
    check_invariant_linear,
    check_swiglu,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows normalized over the last dimension in fp32, rounded to x's type, then multiplied by the weight."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.add_rms_norm.add_rms_norm`."""
    check_add_rms_norm(x, residual, weight)
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute `paged_kernels.swiglu.swiglu`."""
    check_swiglu(gate_up)
    return _gate(gate_up)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `paged_kernels.few_rows_linear.few_rows_linear`."""
    check_few_rows_linear(x, weight, bias, residual, norm, swiglu=swiglu)
    total = x if residual is None else x + residual
    y = F.linear(total if norm is None else rms_norm(total, norm, eps), weight, bias)
    return _gate(y) if swiglu else y, total


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `paged_kernels.invariant_linear.invariant_linear`, one row at a time."""
    check_invariant_linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for row, result in zip(x, out, strict=True):
        result.copy_(F.linear(row, weight, bias))
    return out
