"""Linear layers on a CPU, where one way of multiplying is not the fastest for every number of rows.

    plain     F.linear over the weight as it is
    packed    oneDNN over a copy in its own blocked layout, which F.linear would have to make at each call
    widened   for weights of 16 bits: in pieces that fit a cache, made float32 and multiplied as that

A decode step has few rows, and there reading the weight is all the work: packed wins. With many rows it is arithmetic,
and a CPU with AVX512-BF16 but no AMX multiplies float32 nearly twice as fast as bfloat16. Which way is the fastest for
a shape and a number of rows is measured, once in a process, and the packed copies that win are kept beside the weights.

Or weights of 8 bits, in their place (`quantization`): the scheme that torchao calls int8 dynamic activation and int8
weight, through the operation that torch.compile has for it on x86, oneDNN's.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.kv_cache import GIB
from paged_backend.machine import available_memory

log = logging.getLogger("paged_llm")

ROWS = (1, 4, 16, 64, 256)  # that are measured; any other number goes as the nearest of them
SMALLEST = 1 << 16  # elements: with fewer, a product costs what a call costs
SAMPLE = 1 << 20  # elements of a weight that is measured: a part of the rows of a larger one
SAMPLES = 12  # weights in turn, as layers are: few would stay in a cache
TURNS = 4  # at the least, with many rows
PIECE = 1 << 20  # elements that are widened at a time, at the most
GAIN = 0.95  # of the time of the plain way: another has to be that fast, so that noise does not choose
SHARE = 0.25  # of the memory that is available, for packed copies

Weight = Tensor | Callable[[Tensor, Tensor | None], Tensor]  # [out_features, in_features], or what stands for one


def project(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`F.linear`, by whichever way `weight` knows."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight that is multiplied in the way that is fastest for the number of rows."""

    weight: Tensor  # [out_features, in_features]
    packed: Tensor | None
    ways: tuple[str, ...]  # by number of rows, as `ROWS`

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        way = self.ways[min(x[..., 0].numel().bit_length() // 2, len(ROWS) - 1)]
        if way == "packed":
            return multiply_packed(x, self.packed, bias)
        return F.linear(x, self.weight, bias) if way == "plain" else multiply_widened(x, self.weight, bias)


class Int8:
    """A weight of 8 bits with a scale for each output. Rows are rounded to 8 bits as they come, each with a scale of
    its own, so that what a row gives does not depend on the others."""

    def __init__(self, weight: Tensor) -> None:  # [out_features, in_features]
        codes, scales = _rounded(weight)
        self.codes = torch.ops.onednn.qlinear_prepack(codes.to(torch.int8), None)
        self.scales, self.zeros = scales[:, 0].contiguous(), torch.zeros(len(weight), dtype=torch.int32)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, scales = _rounded(x.flatten(0, -2))
        codes = codes.add_(128).to(torch.uint8)  # the instruction multiplies unsigned numbers by signed ones
        weights, result = (self.codes, self.scales, self.zeros), (1.0, 0, torch.float32)
        out = torch.ops.onednn.qlinear_pointwise(codes, 1.0, 128, *weights, None, *result, "none", [], "").mul_(scales)
        out = out if bias is None else out.add_(bias)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, as float32, and what each row of them is to be multiplied by, [len(rows), 1]."""
    rows = rows.float()
    scales = rows.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales).round_(), scales


def quantize(weight: Tensor) -> Weight:
    """In 8 bits, or as it is where it is so small that this saves nothing: the router of a mixture of experts."""
    return weight if weight.numel() < SMALLEST else Int8(weight)


def pack(weight: Tensor) -> Tensor:
    """A copy in oneDNN's layout. It does not depend on the number of rows, as long as that is more than one."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def multiply_packed(x: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def multiply_widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, out = x.float(), x.new_empty((*x.shape[:-1], len(weight)))
    rows = -(-len(weight) // -(-weight.numel() // PIECE))
    for start in range(0, len(weight), rows):
        piece = slice(start, start + rows)
        out[..., piece] = F.linear(wide, weight[piece].float(), None if bias is None else bias[piece].float())
    return out


@cache
@torch.inference_mode()
def measure(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> tuple[Mapping[str, float], ...]:
    """Seconds of each way that is open to `dtype`, by number of rows as `ROWS`: the median of some tries, in turn.
    `threads` that torch uses: a name for the figures, no choice. The clock is that of this thread, which takes its part
    in each product, so that what else the machine does counts little."""
    rows, columns = shape
    rows = min(rows, max(1, SAMPLE // columns))
    weights = [torch.full((rows, columns), 0.01, dtype=dtype) for _ in range(SAMPLES)]
    ways: dict[str, Callable[[Tensor, int], Tensor]] = {"plain": lambda x, turn: F.linear(x, weights[turn])}
    if dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        copies = [pack(weight) for weight in weights]
        ways["packed"] = lambda x, turn: multiply_packed(x, copies[turn], None)
    if dtype.itemsize == 2:
        ways["widened"] = lambda x, turn: multiply_widened(x, weights[turn], None)
    found = []
    for count in ROWS:
        x, taken = torch.full((count, columns), 0.01, dtype=dtype), {name: list[float]() for name in ways}
        for turn in range(max(TURNS, 64 // count)):
            for name, way in ways.items():
                started = time.thread_time()
                way(x, turn % SAMPLES)
                taken[name].append(time.thread_time() - started)
        found.append({name: statistics.median(every) for name, every in taken.items()})
    return tuple(found)


def choose(times: tuple[Mapping[str, float], ...], without: str | None = None) -> tuple[str, ...]:
    """The way for each number of rows: the fastest, if it is clearly faster than the plain one."""

    def one(seconds: Mapping[str, float]) -> str:
        name = min((name for name in seconds if name != without), key=seconds.__getitem__)
        return name if seconds[name] < GAIN * seconds["plain"] else "plain"

    return tuple(map(one, times))


class Packer:
    """Makes `Linear`s of weights, as long as there is memory for copies."""

    def __init__(self) -> None:
        self.room = SHARE * available_memory()
        self.changed = False  # whether any weight became another

    def __call__(self, weight: Tensor) -> Weight:
        """The weight itself where no other way is faster."""
        if weight.numel() < SMALLEST:
            return weight
        times = measure(tuple(weight.shape), weight.dtype, torch.get_num_threads())
        ways = choose(times)
        if "packed" in ways and weight.nbytes > self.room:
            log.warning(
                "a weight of %s stays as it is: a packed copy, of %.2f GiB, is more than what is left of the %.0f%% of"
                " the available memory that copies may take",
                list(weight.shape), weight.nbytes / GIB, 100 * SHARE,
            )  # fmt: skip
            ways = choose(times, without="packed")
        if set(ways) == {"plain"}:
            return weight
        self.changed = True
        if "packed" not in ways:
            return Linear(weight, None, ways)
        self.room -= weight.nbytes
        return Linear(weight, pack(weight), ways)


def linears(model: nn.Module) -> Iterator[nn.Linear]:
    """The modules that are plain linear layers on a CPU, and are called: not those inside a fused layer."""
    modules = [model]
    while modules:
        module = modules.pop()
        if changed(module):
            continue
        modules += module.children()
        if type(module) is nn.Linear and type(module.weight.data) is Tensor and module.weight.device.type == "cpu":
            yield module


def changed(module: nn.Module) -> bool:
    """Something was put around or in the place of its forward pass."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def quantize_all(model: PreTrainedModel) -> None:
    """Every plain linear layer in 8 bits, those inside fused layers already, and their weights let go; but the head,
    whose rounding costs the most accuracy for its size, is packed only."""
    head = model.get_output_embeddings()
    called = list(linears(model))
    replace([module for module in called if module is not head], quantize)
    replace([module for module in called if module is head], Packer())
    for module in model.modules():
        if type(module) is nn.Linear and module is not head and module.weight.numel() >= SMALLEST:
            module.weight.data = module.weight.data.new_empty(0)


def replace(modules: list[nn.Linear], make: Callable[[Tensor], Weight]) -> Callable[[], None]:
    """Multiply by what `make` makes of the modules' weights, until the function that comes back is called."""
    for module in modules:
        module.forward = partial(project, weight=make(module.weight.data), bias=module.bias)  # type: ignore[method-assign]

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo
