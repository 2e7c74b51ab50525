"""Implementations of layer operations, with their devices and tolerances: Triton, PyTorch and C++."""

from functools import partial

import torch

from paged_kernels.cpu import native

TRITON_DTYPES = [torch.float32, torch.float16]
CPU_DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.float16: dict(rtol=4e-3, atol=4e-3),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
}


def implementations(*, on_cpu, compiled, triton):
    """List (implementation, device, type); the device None stands for that of Triton."""
    levels = [partial(compiled, level=level) for level in native.levels()]
    return [
        *((triton, None, dtype) for dtype in TRITON_DTYPES),
        *((on_cpu, "cpu", dtype) for dtype in CPU_DTYPES),
        *((one, "cpu", dtype) for one in levels for dtype in TOLERANCES),
    ]


def name(value):
    """Return a name of a parameter that is the same in every process."""
    if isinstance(value, tuple):
        return " ".join(map(name, value))
    if isinstance(value, set):
        return "+".join(sorted(value)) or "plain"
    return value.keywords["level"] if isinstance(value, partial) else getattr(value, "__module__", None) or str(value)


def normal(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
