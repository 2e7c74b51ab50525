"""LoRA (Hu et al. 2021) in the linear layers of a model, with a different adapter for each row of a batch.

    a         b            the slots that a step uses, stacked
    ┌──────┐  ┌──────┐
    │slot 0│  │slot 0│     inner = x @ a.T                  [rows, slots * rank]
    │slot 1│  │slot 1│     inner = 0 for the slots of other rows' adapters
    └──────┘  └──────┘     y    += inner @ b                [rows, out_features]
     in        out

Any number of adapters takes two matrix products, without sorting rows by adapter and without synchronization with the
host. Each row also computes the other slots of its step, which costs little if slots are few and ranks low.

The forward functions of the layers are replaced only for the duration of a step that uses an adapter. Steps without
adapters run as if LoRA were disabled. With adapters, fused layers run as separate operations on wrapped weights, which
add the adapter's output to the slice of each joined projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.api.request import Adapter
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.linear import Weight, project
from paged_backend.models.overrides import Overrides, overridden
from paged_backend.models.peft_files import Factors, LoraShapes
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import PackedLinear, pack_linear
from paged_kernels.ops import invariant_linear

PROBE_TOKENS = 13


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The adapter slots that a step uses, and the rows that belong to each."""

    used: tuple[int, ...]  # slots in ascending order
    slots: Tensor  # [num_used] int64: the same on the device
    masked: Tensor  # [num_tokens, num_used, 1] bool: True if the row does not use the slot


def adapter_rows(slots: np.ndarray) -> AdapterRows:
    """Build the assignment from the slot of each row, [num_tokens] int64, with -1 for no adapter."""
    used = np.unique(slots[slots >= 0])
    masked = torch.from_numpy(slots[:, None, None] != used[None, :, None])
    return AdapterRows(tuple(used.tolist()), torch.from_numpy(used), masked)


@dataclass(eq=False)
class StackedFactors:
    """The factors of one linear layer, stacked over all slots and padded with zeros to the maximum rank.

    a, b and the inputs x share a dtype; the outputs y may have another.
    """

    a: Tensor  # [slots, rank, in_features]
    b: Tensor  # [slots, rank, out_features]
    active_slots: set[int] = field(default_factory=set)  # slots whose adapter changes this layer

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @property
    def outputs(self) -> int:
        return self.b.shape[-1]

    def fill_dummy(self, slot: int) -> None:
        """Mark a slot as active."""
        self.load_slot(slot, Factors(self.a[slot], self.b[slot].T))

    def load_slot(self, slot: int, factors: Factors | None) -> None:
        """Copy an adapter's factors into a slot; None clears the slot."""
        if factors is None and slot not in self.active_slots:
            return
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.active_slots.discard(slot)
        if factors is not None:
            rank = len(factors.a)
            self.a[slot, :rank].copy_(factors.a, non_blocking=True)
            self.b[slot, :rank].copy_(factors.b.T, non_blocking=True)
            self.active_slots.add(slot)

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the adapters' outputs for x [num_tokens, in_features] to y [num_tokens, out_features] in place.

        y may be a slice of a wider tensor.
        """
        if self.active_slots.isdisjoint(rows.used):
            return
        first, last = rows.used[0], rows.used[-1] + 1
        used = slice(first, last) if last - first == len(rows.used) else rows.slots
        a, b = self.a[used], self.b[used]
        inner = x @ a.flatten(0, 1).T
        inner.view(len(x), len(rows.used), -1).masked_fill_(rows.masked, 0)  # set, since 0 * inf would give NaN
        if y.dtype == b.dtype:
            y.addmm_(inner, b.flatten(0, 1))
        else:
            y.add_(inner @ b.flatten(0, 1))


class InvariantFactors(StackedFactors):
    """Factors whose output for a row does not depend on the adapters of other rows, on a GPU."""

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the outputs of one adapter after the other, each computed as if it were the only one."""
        for index, slot in enumerate(rows.used):
            if slot in self.active_slots:
                output = invariant_linear(invariant_linear(x, self.a[slot]), self.b[slot].T)
                y.add_(output.masked_fill_(rows.masked[:, index], -0.0))  # adding 0 would change -0


class Lora:
    """The adapter slots of a model on its device. Only the thread that runs the model may use it."""

    def __init__(
        self, model: PreTrainedModel, shapes: LoraShapes, *, slots: int, rank: int, batch_invariant: bool = False
    ) -> None:
        """Allocate the slots. The model must be in its final variant.

        shapes: sizes of the adaptable layers, by name. batch_invariant: multiply in one order; the result of a row then
        does not depend on other rows.
        """
        self.shapes, self.slots, self.rank = shapes, slots, rank
        # On a CPU, torch multiplies the few rows of a decode step half as fast in 16 bits as in 32.
        self.dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        empty = partial(torch.zeros, dtype=self.dtype, device=model.device)
        self._is_packed = batch_invariant and model.device.type == "cpu"
        stacked = InvariantFactors if batch_invariant else StackedFactors
        self._stacks: dict[str, Any] = {
            name: PackedFactors(inputs, outputs, slots=slots, rank=rank)
            if self._is_packed
            else stacked(empty((slots, rank, inputs)), empty((slots, rank, outputs)))
            for name, (inputs, outputs) in shapes.items()
        }
        self._rows: AdapterRows | RowsBySlot | None = None  # adapter rows of the running step
        self._adapted = self._adapt(model)

    @property
    def nbytes(self) -> int:
        """The device memory of all slots in bytes."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def load_slot(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot. On a GPU the copy is ordered with the steps before and after it."""
        for name, stack in self._stacks.items():
            stack.load_slot(slot, adapter.factors.get(name))

    def fill_dummy(self) -> None:
        """Mark every slot as active in all layers, with factors of zero, so that warm-up runs the LoRA path."""
        for slot in range(self.slots):
            for stack in self._stacks.values():
                stack.fill_dummy(slot)

    @contextmanager
    def applied(self, rows: AdapterRows) -> Iterator[None]:
        """Apply the adapters of these rows to forward passes inside the context."""
        self._rows = RowsBySlot.of(rows, self.slots) if self._is_packed else rows
        try:
            with overridden(self._adapted):
                yield
        finally:
            self._rows = None

    def _adapt(self, model: PreTrainedModel) -> Overrides:
        """Make the modules of a model add the outputs of adapters."""
        overrides: Overrides = {}
        modules = dict(model.named_modules())
        projected: set[str] = set()
        if fused := FusedDecoder.of(model):
            layers = []
            for index, layer in enumerate(fused.layers):
                prefix = f"{model.base_model_prefix}.layers.{index}."
                layers.append(layer.with_weights(partial(self._weight, prefix=prefix)))
                projected |= {prefix + name for projection in layer.projections for name in projection.names}
            overrides[fused.module, "forward"] = replace(fused, layers=tuple(layers))
        for name in self._stacks:
            if name not in projected:
                overrides[modules[name], "forward"] = partial(self._forward, [name], modules[name].forward)
        return overrides

    def _weight(self, weight: Weight, names: Sequence[str], *, prefix: str) -> Weight:
        """Wrap the weight of one projection, or of several joined ones, so that it adds the adapters' output."""
        return partial(self._project, [prefix + name for name in names], weight)

    def _project(self, names: Sequence[str], weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._forward(names, partial(project, weight=weight, bias=bias), x)

    def _forward(self, names: Sequence[str], inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        assert self._rows is not None
        y = inner(x)
        rows_in, rows_out = x.reshape(-1, x.shape[-1]).to(self.dtype), y.view(-1, y.shape[-1])
        start = 0
        for name in names:
            stack = self._stacks[name]
            end = start + stack.outputs
            stack.add(rows_out[:, start:end], rows_in, self._rows)
            start = end
        return y


@torch.inference_mode()
def find_adaptable_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return the linear layers that adapters may change, by name, with their input and output sizes.

    These are the layers that process every token of a batch exactly once and in order, which excludes the output layer
    and routed experts. Returns an empty dict if the forward pass fails; `verify_model` then reports the error. The
    model must be unmodified.
    """
    calls: Counter[str] = Counter()
    adaptable: dict[str, tuple[int, int]] = {}
    hooks = []

    def count_calls(name: str, sizes: tuple[int, int]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def called(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            calls[name] += 1
            if arguments and arguments[0].shape[:-1].numel() == PROBE_TOKENS:
                adaptable[name] = sizes

        return called

    for name, module in model.named_modules():
        sizes = _sizes(module)
        if sizes and module is not model.get_output_embeddings():
            hooks.append(module.register_forward_pre_hook(count_calls(name, sizes)))
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sizes for name, sizes in adaptable.items() if calls[name] == 1}


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None


class RowsBySlot(NamedTuple):
    """The rows of a step with an adapter, by slot."""

    order: Tensor  # [num_rows] int64, rows of the step
    starts: Tensor  # [slots + 1] int64: where the rows of each slot start in `order`

    @classmethod
    def of(cls, rows: AdapterRows, slots: int) -> RowsBySlot:
        """Sort the rows of a step by slot."""
        used = ~rows.masked[..., 0].T  # [num_used, num_tokens]
        counts = torch.zeros(slots, dtype=torch.int64)
        counts[rows.slots] = used.sum(1)
        return cls(used.nonzero()[:, 1], F.pad(counts.cumsum(0), (1, 0)))


class PackedFactors:
    """The factors of one linear layer in float32, for each slot, padded with zeros to the maximum rank."""

    def __init__(self, inputs: int, outputs: int, *, slots: int, rank: int) -> None:
        self.outputs, self._rank = outputs, rank
        self._a = [pack_linear(torch.zeros(rank, inputs)) for _ in range(slots)]
        self._b = [pack_linear(torch.zeros(outputs, rank)) for _ in range(slots)]
        self._down, self._up = native.ExpertLinear(self._a), native.ExpertLinear(self._b)

    @property
    def nbytes(self) -> int:
        return sum(packed.groups.nbytes for packed in (*self._a, *self._b))

    def load_slot(self, slot: int, factors: Factors | None) -> None:
        """Copy an adapter's factors into a slot; None clears the slot."""
        if factors is None:
            self._a[slot].groups.zero_()
            self._b[slot].groups.zero_()
            return
        missing = self._rank - len(factors.a)
        _overwrite(self._a[slot], F.pad(factors.a.float(), (0, 0, 0, missing)))
        _overwrite(self._b[slot], F.pad(factors.b.float(), (0, missing)))

    def fill_dummy(self, slot: int) -> None:
        """Do nothing: every slot is computed, whether its adapter changes this layer or not."""

    def add(self, y: Tensor, x: Tensor, rows: RowsBySlot) -> None:
        """Add the adapters' outputs for x [num_tokens, in_features] to y [num_tokens, out_features] in place."""
        product = self._up(self._down(x[rows.order], rows.starts), rows.starts)
        y[rows.order] = (y[rows.order] + product).to(y.dtype)


def _overwrite(packed: PackedLinear, weight: Tensor) -> None:
    packed.groups.copy_(pack_linear(weight).groups)
