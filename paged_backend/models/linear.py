"""Linear layers on a CPU: packed copies of weights for the C++ kernels, and quantized weights.

A copy replaces its weight, which is freed. With the `quantization` option, a quantized weight does. Without the C++
kernels, and for types that they do not support, PyTorch multiplies the weights as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.models.overrides import Overrides
from paged_backend.models.quantization import QuantizationSpec, quantize
from paged_backend.utils.machine import available_memory
from paged_backend.utils.startup import Progress
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import PackedLinear, pack_linear

log = logging.getLogger("paged_llm")

MIN_ELEMENTS = 1 << 16  # minimum size to pack or quantize; below it, call overhead dominates
MEMORY_SHARE = 0.5  # share of the available memory for copies
SENSITIVE_SHARE = 0.125  # share of the elements of weights that keep 8 bits with int4, apart from the output layer

# A weight [out_features, in_features], or a function (x, bias) -> y in its place.
Weight: TypeAlias = "Tensor | Callable[[Tensor, Tensor | None], Tensor]"


def project(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute `F.linear`, with the weight's own method if it is not a plain tensor."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)


class GroupedCopy:
    """A copy of a weight in the layout of the kernel `native.linear`."""

    def __init__(self, weight: Tensor | PackedLinear) -> None:
        """weight: [out_features, in_features], or packed already."""
        self.packed = pack_linear(weight) if isinstance(weight, Tensor) else weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return native.linear(x, self.packed, bias)

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return bool(native.levels()) and dtype in (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class PermutedWeight:
    """A weight whose inputs are in another order than the layer's inputs."""

    weight: GroupedCopy
    order: Tensor  # [in_features]: index of the layer's input for each input of the weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.weight(x[..., self.order], bias)


@dataclass(frozen=True, eq=False)
class JoinedWeight:
    """Weights of the same inputs, whose outputs are joined, in different formats or with different orders of inputs."""

    parts: Sequence[Weight]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = torch.cat([project(x, part, None) for part in self.parts], -1)
        return product if bias is None else product + bias


class Ranks:
    """The ranks that share the weight of a module. Copies of the module share this object: a group cannot be copied."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: None for all ranks."""
        self._group = group

    @property
    def rank(self) -> int:
        """The index of this process among the ranks."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self._group)

    def sum(self, x: Tensor) -> Tensor:
        """Add the tensors of all ranks in place."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, joined in the last dimension. They have the same shape."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are split over ranks. Each rank multiplies its own, and the products are summed."""

    ranks: Ranks

    def forward(self, x: Tensor, weight: Weight | None = None) -> Tensor:
        """Compute the layer. weight: replaces its own weight [out_features, in_features of this rank]."""
        product = self.ranks.sum(project(x, self.weight if weight is None else weight, None))
        return product if self.bias is None else product + self.bias


# Classes of linear layers whose weights may be replaced by packed and quantized ones.
CONVERTIBLE = (nn.Linear, RowParallelLinear)


class WeightPacker:
    """Packs weights for the C++ kernels, within a memory budget. With `batch_invariant`, all weights are packed, since
    the kernels add in one order for any number of rows."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        self.replaced: list[Tensor] = []  # original weights that are no longer used
        self.changed = False  # whether any weight was packed
        self.lacks_memory = False  # whether a weight was not packed because its copy did not fit
        self._budget = MEMORY_SHARE * available_memory()
        self._warned: set[torch.Size] = set()  # shapes only: a mixture of experts has thousands of equal weights

    def __call__(self, weight: Tensor) -> Weight:
        """Return the packed weight, or the weight itself if it is small, of another type, or beyond the budget."""
        if not self._batch_invariant and (weight.numel() < MIN_ELEMENTS or not GroupedCopy.supports(weight.dtype)):
            return weight
        if weight.nbytes > self._budget:
            if self._batch_invariant:
                share = f"{MEMORY_SHARE:.0%} of the available memory"
                raise ConfigError(f"batch_invariant=true: copies of all weights do not fit into {share}")
            self.lacks_memory = True
            if weight.shape not in self._warned:
                self._warned.add(weight.shape)
                log.warning(
                    "a weight of shape %s is not packed: its faster copy of %.2f GiB exceeds the remaining budget,"
                    " which is %.0f%% of the available memory for all copies; this holds for others of this shape, too",
                    list(weight.shape), weight.nbytes / GIB, 100 * MEMORY_SHARE,
                )  # fmt: skip
            return weight
        self._budget -= weight.nbytes
        self.changed = True
        self.replaced.append(weight)
        return GroupedCopy(weight)


class WeightQuantizer:
    """Rounds weights to 8 or 4 bits."""

    def __init__(self, spec: QuantizationSpec, model: PreTrainedModel, *, batch_invariant: bool = False) -> None:
        self._packer = WeightPacker(batch_invariant=batch_invariant)  # for small weights
        self.replaced = self._packer.replaced
        self.bits: int | None = spec.bits
        self.int8_rows = spec.int8_rows
        self.description = f"int{spec.bits} weights"
        self._spec = spec
        self._num_weights = self._num_rounded = 0
        self._model = model
        self._progress = Progress(
            "quantizing", sum(size for size in linear_sizes(model) if size >= MIN_ELEMENTS), "weights"
        )

    def __call__(self, weight: Tensor) -> Weight:
        """Return the quantized weight. A small weight, for example a router of a mixture of experts, keeps its type."""
        self._num_weights += 1
        if weight.numel() < MIN_ELEMENTS:
            return self._packer(weight)
        self._num_rounded += 1
        self.replaced.append(weight)
        bits = self._spec.bits
        if bits < 8 and weight.untyped_storage().data_ptr() in self._in_8_bits:
            bits = 8
        packed = quantize(weight, bits, self._spec.group_size)
        self._progress.advance(weight.numel())
        return GroupedCopy(packed._replace(int8_rows=self.int8_rows))

    @cached_property
    def _in_8_bits(self) -> set[int]:
        """The weights that have 8 bits with int4, when the first weight is rounded: fusing has moved them."""
        return sensitive_weights(self._model)

    def log_rounded(self) -> str | None:
        """Log how many weights are rounded. Weights that are multiplied at once, such as queries and keys, count as
        one.

        Returns the name of their format, or None if all weights are too small.
        """
        count, name = self._num_rounded, f"int{self._spec.bits}"
        if not count:
            log.warning(
                'quantization="%s" has no effect: each of the %d weights has less than %d elements',
                name, self._num_weights, MIN_ELEMENTS,
            )  # fmt: skip
            return None
        log.info(
            "%d of %d weights are rounded for %s; those with less than %d elements stay as they are",
            count, self._num_weights, name, MIN_ELEMENTS,
        )  # fmt: skip
        return name


def sensitive_weights(model: PreTrainedModel) -> set[int]:
    """Return the addresses of the memory of weights that are rounded to 8 bits with int4.

    These are the output layer, which is the most sensitive, and the weights with the smallest linear layers, up to
    SENSITIVE_SHARE of all elements. In most models, these are keys and values, if several heads share them. If several
    layers are views of one weight, such as queries, keys and values, the size of the smallest layer counts.
    """
    weights: dict[int, list[int]] = {}  # sizes of the layers that are in the same memory
    for size, weight in _linear_weights(model):
        weights.setdefault(weight.untyped_storage().data_ptr(), []).append(size)
    weights = {address: sizes for address, sizes in weights.items() if sum(sizes) >= MIN_ELEMENTS}
    output = getattr(model.get_output_embeddings(), "weight", None)  # a stage before the last has none
    sensitive = set() if output is None else {output.untyped_storage().data_ptr()}
    for address in sensitive:
        weights.pop(address, None)
    room = SENSITIVE_SHARE * sum(map(sum, weights.values()))
    for smallest in sorted({min(sizes) for sizes in weights.values()}):
        chosen = {address: sum(sizes) for address, sizes in weights.items() if min(sizes) == smallest}
        room -= sum(chosen.values())
        if room < 0:
            break
        sensitive |= chosen.keys()
    return sensitive


def linear_sizes(model: PreTrainedModel) -> list[int]:
    """Return the number of elements of each weight that is multiplied."""
    return [size for size, _ in _linear_weights(model)]


def _linear_weights(model: PreTrainedModel) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of elements of each weight that is multiplied, and the parameter that it is in."""
    for module in model.modules():
        if type(module) in CONVERTIBLE:
            yield module.weight.numel(), module.weight
    for parameter in model.parameters():
        if parameter.dim() == 3:  # the weights of all experts of a layer
            yield from ((expert.numel(), parameter) for expert in parameter)


def release(model: PreTrainedModel, weights: Iterable[Tensor]) -> Callable[[], None]:
    """Free these weights, or views of them, in the model. Returns a function that restores them.

    A weight that an embedding shares is kept.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {module.weight.untyped_storage().data_ptr() for module in embeddings}
    unused = {weight.untyped_storage().data_ptr() for weight in weights} - embedded
    released = [
        (parameter, parameter.data)
        for parameter in model.parameters()
        if type(parameter.data) is Tensor and parameter.untyped_storage().data_ptr() in unused
    ]
    for parameter, weight in released:
        parameter.data = weight.new_empty(0)

    def restore() -> None:
        for parameter, weight in released:
            parameter.data = weight

    return restore


def convert_linears(linears: Iterable[nn.Linear], convert: Callable[[Tensor], Weight]) -> Overrides:
    """Make linear layers multiply by converted weights."""
    overrides: Overrides = {}
    for linear in linears:
        weight = convert(linear.weight.data)
        if isinstance(linear, RowParallelLinear):
            overrides[linear, "forward"] = partial(linear.forward, weight=weight)
        else:
            overrides[linear, "forward"] = partial(project, weight=weight, bias=linear.bias)
    return overrides


def is_convertible(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a plain linear layer on a CPU."""
    return type(module) in CONVERTIBLE and type(module.weight.data) is Tensor and module.weight.device.type == "cpu"
