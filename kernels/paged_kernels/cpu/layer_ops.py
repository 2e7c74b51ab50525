"""RMSNorm and SwiGLU in plain PyTorch: for a CPU without compiled kernels, and for torch.compile to fuse."""

import torch.nn.functional as F
from torch import Tensor

from paged_kernels.arguments import check_add_rms_norm, check_swiglu


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
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up
