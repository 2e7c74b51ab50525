"""Measure one mixture of experts on a CPU: packed and quantized weights, beside transformers' own implementations.

Weights and routing are random. Several layers are used in turn, so no cache holds their weights. All contestants
compute the same rows, and their outputs are compared with transformers' loop over experts.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from paged_backend.api.config import DTYPES
from paged_backend.execution.cpu_threads import count_threads
from paged_backend.models.experts import ConvertedExperts
from paged_backend.models.linear import GroupedCopy
from paged_backend.models.quantization import quantize
from paged_backend.utils.machine import limit_torch_threads
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, figures, not_measured, rounds_option
from paged_bench._timing import Call, timer
from paged_kernels.cpu import native

LOOP, GROUPED = "transformers, loop over experts", "transformers, grouped_mm"
BITS = {"int8": 8, "int4": 4}
GROUP_SIZE = 32
TARGET = 1.0  # speed over the faster implementation of transformers
CPU = torch.device("cpu")
LAYERS = 2  # layers that are used in turn

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


@torch.inference_mode()
def compare(
    made: Mapping[str, Sequence[Experts]], inputs: tuple[Tensor, Tensor, Tensor], rounds: int
) -> Iterator[Record]:
    """Compare a step of some rows."""
    rows, expected = len(inputs[0]), made[LOOP][0](*inputs).double()

    def call(layers: Sequence[Experts]) -> Call:
        return lambda index: layers[index](*inputs)

    timers = {name: timer(call(layers), len(layers), CPU) for name, layers in made.items()}
    contest = alternate(timers, rounds, quiet=True)
    fastest = min((GROUPED, LOOP), key=lambda name: contest.medians[name])
    for name, seconds in contest.medians.items():
        yield Record(f"{rows} rows, {name}", 1e3 * seconds, "ms")
        if name in (GROUPED, LOOP):
            continue
        target = TARGET if name == "packed" else None
        yield contest.ratio(f"{rows} rows, speed of {name} over transformers", fastest, name, target)
        error = float((made[name][0](*inputs).double() - expected).norm() / expected.norm())
        yield Record(f"{rows} rows, error of {name}", error, "of the loop's outputs")


def measure(args: Namespace) -> Iterator[Record]:
    if not native.levels():
        yield not_measured("experts", "the C++ kernels are not compiled")
        return
    limit_torch_threads(1)  # as in the engine
    native.set_threads(count_threads())
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    made = contestants(make_layers(args.shape, dtype, LAYERS))
    for rows in args.rows:
        print(f"{rows} rows ...", file=sys.stderr, flush=True)
        yield from compare(made, make_inputs(args.shape, dtype, rows), args.rounds)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    times = [record for record in records if record.unit == "ms"]
    for rows in dict.fromkeys(record.name.partition(" rows, ")[0] for record in times):
        yield Bars(f"{rows} rows, ms", figures(times, f"{rows} rows, (.*)"), grey=[GROUPED, LOOP])


SHAPE = "experts, experts of a row, hidden and inner size (default: Qwen3-30B-A3B's, 128x8x2048x768)"
main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        Option("--shape", SHAPE, (128, 8, 2048, 768), type=_shape, metavar="ExKxHxI"),
        Option("--dtype", "data type of weights", "bfloat16", choices=sorted(DTYPES)),
        Option("--rows", "rows of a step", [1, 16, 256], many=True),
        rounds_option(5),
    ),
    quick={"shape": (16, 4, 512, 256), "rounds": 2},
)
