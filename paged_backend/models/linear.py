"""Linear layers on a CPU, where one way of multiplying is not the fastest for every number of rows.

    plain     F.linear over the weight as it is
    onednn    over a copy in oneDNN's own layout, which F.linear would have to make at each call
    groups    our kernel, over a copy in groups of outputs: 16 bits are widened in registers and summed in float32

Which way is the fastest for a shape and a number of rows is measured, once in a process. The copy that wins is kept,
and the weight itself let go where the copy is the fastest for every number of rows.

Or weights of 8 bits, in their place (`quantization`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from paged_kernels.cpu import native
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.memory.kv_cache import GIB
from paged_backend.utils.machine import available_memory

log = logging.getLogger("paged_llm")

ROWS = (1, 4, 16, 64, 256)  # that are measured; any other number goes as the nearest of them
SMALLEST = 1 << 16  # elements: with fewer, a product costs what a call costs
SAMPLE = 1 << 20  # elements of a weight that is measured: a part of the rows of a larger one
SAMPLES = 12  # weights in turn, as layers are: few would stay in a cache
TURNS = 4  # at the least, with many rows
GAIN = 0.95  # of the time of the plain way: another has to be that fast, so that noise does not choose
SHARE = 0.5  # of the memory that is available, for copies

Weight = Tensor | Callable[[Tensor, Tensor | None], Tensor]  # [out_features, in_features], or what stands for one


def project(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`F.linear`, by whichever way `weight` knows."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)


class OneDnn:
    """A copy in oneDNN's layout. It does not depend on the number of rows, as long as that is more than one."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    @staticmethod
    def multiplies(dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Groups:
    """A copy as our kernel reads it (`native.linear`)."""

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        self.packed = native.pack_linear(weight, scales)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return native.linear(x, self.packed, bias)

    @staticmethod
    def multiplies(dtype: torch.dtype) -> bool:
        return bool(native.levels()) and dtype in (torch.float32, torch.float16, torch.bfloat16)


COPIES: Mapping[str, type[OneDnn | Groups]] = {"onednn": OneDnn, "groups": Groups}


@dataclass(frozen=True, eq=False)
class Linear:
    """A weight and a copy, of which one is faster for some numbers of rows and the other for the rest."""

    weight: Tensor  # [out_features, in_features]
    copy: OneDnn | Groups
    copied: tuple[bool, ...]  # whether the copy is the faster one, by number of rows as `ROWS`

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        copied = self.copied[min(x[..., 0].numel().bit_length() // 2, len(ROWS) - 1)]
        return self.copy(x, bias) if copied else F.linear(x, self.weight, bias)


@cache
@torch.inference_mode()
def measure(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> tuple[Mapping[str, float], ...]:
    """Seconds of each way that is open to `dtype`, by number of rows as `ROWS`: the median of some tries, in turn.
    `threads` that torch uses: a name for the figures, no choice. The clock is that of this thread, which takes its part
    in each product, so that what else the machine does counts little."""
    rows, columns = shape
    rows = min(rows, max(1, SAMPLE // columns))
    weights = [torch.full((rows, columns), 0.01, dtype=dtype) for _ in range(SAMPLES)]
    ways: dict[str, list[Weight]] = {"plain": [*weights]}
    ways |= {name: [made(one) for one in weights] for name, made in COPIES.items() if made.multiplies(dtype)}
    found = []
    for count in ROWS:
        x, taken = torch.full((count, columns), 0.01, dtype=dtype), {name: list[float]() for name in ways}
        for turn in range(max(TURNS, 64 // count)):
            for name, those in ways.items():
                started = time.thread_time()
                project(x, those[turn % SAMPLES], None)
                taken[name].append(time.thread_time() - started)
        found.append({name: statistics.median(every) for name, every in taken.items()})
    return tuple(found)


def choose(times: tuple[Mapping[str, float], ...]) -> tuple[str, tuple[bool, ...]] | None:
    """The copy that saves the most time, with equal weight for every number of rows, and for which of them it is used:
    those for which it is clearly faster than the weight itself. None where no copy is."""

    def share(name: str) -> float:
        return sum(min(1.0, seconds[name] / seconds["plain"]) for seconds in times)

    best = min(times[0].keys() - {"plain"}, key=share, default="plain")
    copied = tuple(seconds[best] < GAIN * seconds["plain"] for seconds in times)
    return (best, copied) if any(copied) else None


class Packer:
    """Makes copies of weights that are faster, as long as there is memory for them."""

    def __init__(self) -> None:
        self.replaced: list[Tensor] = []  # weights that are not used any more
        self.changed = False  # whether any weight became another
        self._room = SHARE * available_memory()

    def __call__(self, weight: Tensor) -> Weight:
        """The weight itself where no copy is faster."""
        if weight.numel() < SMALLEST:
            return weight
        choice = choose(measure(tuple(weight.shape), weight.dtype, torch.get_num_threads()))
        if choice is None:
            return weight
        if weight.nbytes > self._room:
            log.warning(
                "a weight of %s stays as it is: a faster copy, of %.2f GiB, is more than what is left of the %.0f%% of"
                " the available memory that copies may take",
                list(weight.shape), weight.nbytes / GIB, 100 * SHARE,
            )  # fmt: skip
            return weight
        self._room -= weight.nbytes
        self.changed = True
        name, copied = choice
        copy = COPIES[name](weight)
        if not all(copied):
            return Linear(weight, copy, copied)
        self.replaced.append(weight)
        return copy


class Quantizer:
    """Rounds weights to 8 bits with a scale for each output."""

    def __init__(self) -> None:
        self.replaced: list[Tensor] = []

    def __call__(self, weight: Tensor) -> Weight:
        """The weight itself where that would save nothing: the router of a mixture of experts."""
        if weight.numel() < SMALLEST:
            return weight
        self.replaced.append(weight)
        rows = weight.float()
        scales = rows.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        return Groups((rows / scales[:, None]).round_().to(torch.int8), scales)


def release(model: PreTrainedModel, weights: Iterable[Tensor]) -> Callable[[], None]:
    """Let the linear layers let go of those weights, or of parts of them; an embedding keeps what it shares. The
    function that comes back gives them back."""
    embedded = {one.weight.untyped_storage().data_ptr() for one in model.modules() if isinstance(one, nn.Embedding)}
    gone = {weight.untyped_storage().data_ptr() for weight in weights} - embedded
    released = []
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.untyped_storage().data_ptr() in gone:
            released.append((module, module.weight.data))
    for module, weight in released:
        module.weight.data = weight.new_empty(0)

    def restore() -> None:
        for module, weight in released:
            module.weight.data = weight

    return restore


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


def replace(modules: list[nn.Linear], make: Callable[[Tensor], Weight]) -> Callable[[], None]:
    """Multiply by what `make` makes of the modules' weights, until the function that comes back is called."""
    for module in modules:
        module.forward = partial(project, weight=make(module.weight.data), bias=module.bias)  # type: ignore[method-assign]

    def undo() -> None:
        for module in modules:
            del module.forward

    return undo
