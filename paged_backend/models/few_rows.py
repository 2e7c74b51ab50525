"""Linear layers of decode steps on a GPU: one launch with the norm and the activation around them, where it is faster.

With few rows, cuBLAS and `few_rows_linear` both read the weight once, and launches take a part of the time. Which one
is faster depends on the shapes and on the GPU, so it is measured when the model loads, for each of the four linear
layers of a decoder layer.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paged_backend.models.decoder import FewRowsWeight, FusedDecoder, Projection, projections_by_name
from paged_backend.models.linear import Weight
from paged_kernels.compilation import compile_ahead

log = logging.getLogger("paged_llm")

ROWS = (1, 4, 16, 32)  # numbers of rows that are measured
MAX_LAYERS = 16  # layers whose weights are used in rotation, so that they are not in the L2 cache
REPEATS = 5
DTYPES = (torch.bfloat16, torch.float32)  # in fp16 the product of hidden states and the norm's weight may overflow

Measure = Callable[[Sequence[Callable[[], Any]]], float]  # returns the seconds that the device takes for all calls


def with_few_rows(decoder: FusedDecoder, measure: Measure) -> FusedDecoder | None:
    """Return the decoder with `few_rows_linear` in each projection, up to the number of rows for which it is faster.
    Return None if it never is."""
    groups = projections_by_name(decoder.layers)
    runs = {names: _measured(group[0]) for names, group in groups.items()}
    weights: dict[tuple[str, ...], list[Any]] = {
        names: [projection.weight for projection in groups[names]] for names in groups
    }

    def launch_all() -> None:
        for names, run in runs.items():
            weight = weights[names][0]
            for count in ROWS:
                run(_rows(count, weight), FewRowsWeight(weight, count))
                run(_rows(count, weight), weight)

    compile_ahead(decoder.module.device, launch_all)
    max_rows = {names: choose_max_rows(weights[names], run, measure) for names, run in runs.items()}
    log.info("rows up to which projections take one launch: %s", {names[0]: n for names, n in max_rows.items()})

    def convert(weight: Tensor, names: Sequence[str]) -> Weight:
        rows = max_rows[tuple(names)]
        return FewRowsWeight(weight, rows) if rows else weight

    return decoder.with_weights(convert) if any(max_rows.values()) else None


def _measured(projection: Projection) -> Callable[[Tensor, Weight], Any]:
    """Return the function that is measured for a projection. It takes the input and a weight."""

    def run(x: Tensor, weight: Weight) -> Any:
        converted = replace(projection, weight=weight)
        return converted(x) if converted.norm is None else converted.add(x, x)

    return run


def choose_max_rows(weights: Sequence[Tensor], run: Callable[[Tensor, Weight], Any], measure: Measure) -> int:
    """Return up to how many rows `few_rows_linear` is faster; 0 if it never is.

    weights: weights of one linear layer in several decoder layers. run: computes the layer, with the norm and the
    activation around it, for rows [num_rows, in_features].
    """
    weights, max_rows = weights[:MAX_LAYERS], 0
    for count in ROWS:
        rows = _rows(count, weights[0])
        together = measure([partial(run, rows, FewRowsWeight(weight, count)) for weight in weights])
        if together >= measure([partial(run, rows, weight) for weight in weights]):
            break
        max_rows = count
    return max_rows


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
