"""Measure one mixture of experts on a CPU: packed and quantized weights, beside transformers' own implementations.

Weights and routing are random. Several layers are used in turn, so that no cache holds their weights. All contestants
compute the same rows, and their outputs are compared with those of transformers' loop over experts.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from paged_backend.api.options import DTYPES
from paged_backend.execution.cpu_threads import count_threads
from paged_backend.models.experts import ConvertedExperts
from paged_backend.models.linear import GroupedCopy
from paged_backend.models.quantization import quantize
from paged_backend.utils.machine import limit_torch_threads
from paged_bench import _chart
from paged_bench._race import race, timer
from paged_bench._report import Record, Records, arguments, count, not_measured, parser, publish, ratio
from paged_kernels.cpu import native

LOOP, GROUPED = "transformers, loop over experts", "transformers, grouped_mm"
BITS = {"int8": 8, "int4": 4}
GROUP_SIZE = 32
TARGET = 1.0  # speed over the faster implementation of transformers
CPU = torch.device("cpu")

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def _shape(text: str) -> tuple[int, int, int, int]:
    """Parse experts, experts of a row, hidden size and inner size: 128x8x2048x768."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ArgumentTypeError(f"{text!r}: must be EXPERTSxTOP_KxHIDDENxINNER")
    experts, top_k, hidden, inner = map(int, parts)
    if top_k > experts:
        raise ArgumentTypeError(f"{text!r}: {top_k} experts of a row, but there are {experts}")
    return experts, top_k, hidden, inner


def make_layers(shape: tuple[int, int, int, int], dtype: torch.dtype, number: int) -> list[nn.Module]:
    """Return modules of experts with random weights."""
    experts, top_k, hidden, inner = shape
    config = Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden, moe_intermediate_size=inner
    )
    layers = [Qwen3MoeExperts(config).to(dtype).requires_grad_(False) for _ in range(number)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return layers


def contestants(layers: Sequence[nn.Module]) -> dict[str, list[Experts]]:
    """Return the implementations, each with one function per layer."""

    def own(implementation: str) -> list[Experts]:
        def run(layer: nn.Module) -> Experts:
            def forward(*inputs: Tensor) -> Tensor:
                layer.config._experts_implementation = implementation
                return layer(*inputs)

            return forward

        return [run(layer) for layer in layers]

    made: dict[str, list[Experts]] = {"packed": [ConvertedExperts(layer, GroupedCopy) for layer in layers]}
    for name, bits in BITS.items():
        convert = partial(_quantized, bits)
        made[name] = [ConvertedExperts(layer, convert) for layer in layers]
    return {**made, GROUPED: own("grouped_mm"), LOOP: own("eager")}


def _quantized(bits: int, weight: Tensor) -> GroupedCopy:
    return GroupedCopy(quantize(weight, bits, GROUP_SIZE))


def make_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states, experts and weights of the experts."""
    experts, top_k, hidden, _ = shape
    chosen = torch.rand(rows, experts).topk(top_k).indices
    return torch.randn(rows, hidden).to(dtype), chosen, torch.rand(rows, top_k).softmax(-1).to(dtype)


def _run(layers: Sequence[Experts], inputs: tuple[Tensor, Tensor, Tensor], index: int) -> Tensor:
    return layers[index](*inputs)


@torch.inference_mode()
def measure(made: dict[str, list[Experts]], inputs: tuple[Tensor, Tensor, Tensor], rounds: int) -> list[Record]:
    """Measure a step of some rows."""
    rows, expected = len(inputs[0]), made[LOOP][0](*inputs).double()
    timers = {name: timer(partial(_run, layers, inputs), len(layers), CPU) for name, layers in made.items()}
    taken = race(timers, rounds)
    medians = {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}
    fastest = min((GROUPED, LOOP), key=lambda name: medians[name])
    records = []
    for name in made:
        records.append(Record(f"{rows} rows, {name}", medians[name], "ms"))
        if name in (GROUPED, LOOP):
            continue
        target = TARGET if name == "packed" else None
        records.append(ratio(f"{rows} rows, speed of {name} over transformers", taken[fastest], taken[name], target))
        error = float((made[name][0](*inputs).double() - expected).norm() / expected.norm())
        records.append(Record(f"{rows} rows, error of {name}", error, "of the loop's outputs"))
    return records


def main(argv: Sequence[str]) -> int:
    made = parser("experts", __doc__)
    add = made.add_argument
    add("--shape", type=_shape, default="128x8x2048x768", metavar="ExKxHxI",
        help="experts, experts of a row, hidden and inner size (default: Qwen3-30B-A3B's, 128x8x2048x768)")  # fmt: skip
    add("--dtype", default="bfloat16", choices=sorted(DTYPES), help="data type of weights (default: bfloat16)")
    add("--rows", type=count, action="append", metavar="N", help="rows of a step (default: 1, 16 and 256); repeatable")
    add("--layers", type=count, default=2, metavar="N", help="layers that are used in turn (default: 2)")
    add("--rounds", type=count, default=5, metavar="N", help="number of rounds (default: 5)")
    args = arguments(made, argv, {"shape": "16x4x512x256", "rounds": 2})
    if not native.levels():
        publish(
            Records(args, [not_measured("experts", "the C++ kernels are not compiled")]), lambda file, caption: None
        )
        return 1
    limit_torch_threads(1)  # as in the engine
    native.set_threads(count_threads())
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    layers = make_layers(args.shape, dtype, args.layers)
    implementations, records = contestants(layers), Records(args)
    for rows in args.rows or (1, 16, 256):
        print(f"{rows} rows ...", file=sys.stderr, flush=True)
        records += measure(implementations, make_inputs(args.shape, dtype, rows), args.rounds)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    times = [one for one in records if one.unit == "ms"]
    numbers = list(dict.fromkeys(one.name.partition(" rows, ")[0] for one in times))
    figure, axes = _chart.panels(len(numbers), 5)
    for each, rows in zip(axes, numbers, strict=True):
        mine = [one for one in times if one.name.startswith(f"{rows} rows")]
        values = {one.name.partition(" rows, ")[2]: one.value or 0.0 for one in mine}
        _chart.bars(each, values, f"{rows} rows, ms", grey=[name for name in values if "transformers" in name])
        if each is not axes[0]:
            each.set_yticklabels([])
    _chart.save(figure, file, caption)
