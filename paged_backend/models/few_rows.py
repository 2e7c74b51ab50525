"""Linear layers of decode steps on a GPU: one launch with the norm and the activation around them, where it is faster.

With few rows, cuBLAS and `few_rows_linear` both read the weight once, and launches take a part of the time. Which one
is faster depends on the shapes and on the GPU, so it is measured when the model loads, for each of the four linear
layers of a decoder layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.models.linear import Weight, project
from paged_kernels.ops import add_rms_norm, few_rows_linear, swiglu

ROWS = (1, 4, 16, 32)  # numbers of rows that are measured
MAX_LAYERS = 16  # layers whose weights are used in rotation, so that they are not in the L2 cache
REPEATS = 5
DTYPES = (torch.bfloat16, torch.float32)  # in fp16 the product of hidden states and the norm's weight may overflow

Measure = Callable[[Sequence[Callable[[], Any]]], float]  # returns the seconds that the device takes for all calls


@dataclass(frozen=True, eq=False)
class FewRowsWeight:
    """A weight [out_features, in_features] that is multiplied by `few_rows_linear` for up to `max_rows` rows."""

    weight: Tensor
    max_rows: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2 and len(x) <= self.max_rows:
            return few_rows_linear(x, self.weight, bias)[0]
        return F.linear(x, self.weight, bias)


def norm_project(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    *,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add, normalize and project; gated: then apply SwiGLU.

    Returns the projection [num_tokens, out_features], or with SwiGLU [num_tokens, out_features // 2], and the sum of x
    and residual.
    """
    if isinstance(weight, FewRowsWeight) and len(x) <= weight.max_rows:
        return few_rows_linear(x, weight.weight, bias, residual=residual, norm=norm, eps=eps, swiglu=gated)
    normed, total = add_rms_norm(x, residual, norm, eps)
    projected = project(normed, weight, bias)
    return swiglu(projected) if gated else projected, total


def choose_max_rows(weights: Sequence[Tensor], run: Callable[[Tensor, Weight], Any], measure: Measure) -> int:
    """Return up to how many rows `few_rows_linear` is faster; 0 if it never is.

    weights: of one linear layer, in several decoder layers. run: computes the layer, with what surrounds it, for rows
    [num_rows, in_features].
    """
    weights, found = weights[:MAX_LAYERS], 0
    for count in ROWS:
        rows = _rows(count, weights[0])
        together = measure([partial(run, rows, FewRowsWeight(weight, count)) for weight in weights])
        if together >= measure([partial(run, rows, weight) for weight in weights]):
            break
        found = count
    return found


def launch_once(weight: Tensor, run: Callable[[Tensor, Weight], Any]) -> None:
    """Launch every kernel that `choose_max_rows` measures."""
    for count in ROWS:
        rows = _rows(count, weight)
        run(rows, FewRowsWeight(weight, count))
        run(rows, weight)


def _rows(count: int, weight: Tensor) -> Tensor:
    return torch.full((count, weight.shape[1]), 0.01, dtype=weight.dtype, device=weight.device)


def measure_on_gpu(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the median seconds of several replays of a CUDA graph of these calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    seconds = []
    for _ in range(1 + REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        seconds.append(before.elapsed_time(after) / 1000)
    return statistics.median(seconds[1:])
