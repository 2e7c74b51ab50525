"""LoRA (Hu et al. 2021) over the linear layers of a model, a different adapter for each row of a batch.

    a         b            the slots that a step uses, one below the other
    ┌──────┐  ┌──────┐
    │slot 0│  │slot 0│     inner = x @ a.T                  [rows, slots * rank]
    │slot 1│  │slot 1│     inner = 0 where the row is of another slot, or of none
    └──────┘  └──────┘     y    += inner @ b                [rows, out_features]
     in        out

Two products for any number of adapters, which do not look at whose rows lie where: nothing is sorted, and nothing
waits for the host. A row also pays for the slots of others in its step, which is little while they are few and narrow.

A step in which nobody has an adapter runs as if there were none: only for the others the forward passes of the layers
are replaced, for as long as the step takes. Fused layers then run part by part, over weights that add what adapters
give to the slices that were projections of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_backend.api.request import Adapter
from paged_backend.models.adapter_rows import AdapterRows
from paged_backend.models.fusion import FusedLayer
from paged_backend.models.linear import Weight, project
from paged_backend.models.peft_files import Factors, LoraShapes

PROBE_TOKENS = 13


@dataclass(eq=False)
class StackedFactors:
    """What all adapters on the device add to one linear layer. Where one adds nothing, or has a lower rank: zeros.
    Both are of one type, that of x; y may have another."""

    a: Tensor  # [slots, rank, in_features]
    b: Tensor  # [slots, rank, out_features]
    held: set[int] = field(default_factory=set)  # slots that add anything

    def load_slot(self, slot: int, factors: Factors | None) -> None:
        if factors is None and slot not in self.held:
            return
        self.a[slot].zero_()
        self.b[slot].zero_()
        self.held.discard(slot)
        if factors is not None:
            rank = len(factors.a)
            self.a[slot, :rank].copy_(factors.a, non_blocking=True)
            self.b[slot, :rank].copy_(factors.b.T, non_blocking=True)
            self.held.add(slot)

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """To y [num_tokens, out_features], which may be a slice of more columns, for x [num_tokens, in_features]."""
        if self.held.isdisjoint(rows.used):
            return
        first, last = rows.used[0], rows.used[-1] + 1
        in_turn = last - first == len(rows.used)
        a, b = (one[first:last] if in_turn else one[rows.slots] for one in (self.a, self.b))
        inner = x @ a.flatten(0, 1).T
        inner.view(len(x), len(rows.used), -1).masked_fill_(rows.others, 0)  # not times 0: it may have overflowed
        if y.dtype == b.dtype:
            y.addmm_(inner, b.flatten(0, 1))
        else:
            y.add_(inner @ b.flatten(0, 1))


class Lora:
    """The adapters of a model on its device. Owned by the thread that runs the model."""

    def __init__(self, model: PreTrainedModel, shapes: LoraShapes, *, slots: int, rank: int):
        """After the model has the form in which it runs. shapes: of the layers that may be adapted."""
        self.shapes, self.slots, self.rank = shapes, slots, rank
        # On a CPU torch multiplies the few rows of a decode step in 16 bits half as fast as in 32.
        self.dtype = torch.float32 if model.device.type == "cpu" else model.dtype
        empty = partial(torch.zeros, dtype=self.dtype, device=model.device)
        self._stacks = {
            name: StackedFactors(empty((slots, rank, inputs)), empty((slots, rank, outputs)))
            for name, (inputs, outputs) in shapes.items()
        }
        self._rows: AdapterRows | None = None  # of the step that runs
        self._forwards = dict(self._adapted(model))

    @property
    def nbytes(self) -> int:
        return sum(one.a.nbytes + one.b.nbytes for one in self._stacks.values())

    def load_slot(self, slot: int, adapter: Adapter) -> None:
        """Let a slot hold an adapter. On a GPU in order with the steps around it."""
        for name, stack in self._stacks.items():
            stack.load_slot(slot, adapter.factors.get(name))

    def fill_dummy(self) -> None:
        """Every slot with an adapter of all layers that adds nothing, so that a step can be tried out."""
        for slot in range(self.slots):
            for stack in self._stacks.values():
                stack.load_slot(slot, Factors(stack.a[slot], stack.b[slot].T))

    @contextmanager
    def applied(self, rows: AdapterRows) -> Iterator[None]:
        """Inside it a forward pass of the model over these rows goes through their adapters."""
        before = {module: vars(module).get("forward") for module in self._forwards}
        self._rows = rows
        try:
            for module, forward in self._forwards.items():
                vars(module)["forward"] = forward
            yield
        finally:
            self._rows = None
            for module, forward in before.items():
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward

    def _adapted(self, model: PreTrainedModel) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """What takes the place of which module's forward pass."""
        modules = dict(model.named_modules())
        fused = {name: module.forward for name, module in modules.items() if isinstance(module.forward, FusedLayer)}
        for name, layer in fused.items():
            yield modules[name], layer.over(partial(self._weight, prefix=f"{name}."))
        for name in self._stacks:
            if not any(name.startswith(f"{layer}.") for layer in fused):
                yield modules[name], partial(self._forward, [name], modules[name].forward)

    def _weight(self, weight: Weight, names: Sequence[str], *, prefix: str) -> Weight:
        """A weight, or several joined, with what adapters add to it."""
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
            end = start + stack.b.shape[-1]
            stack.add(rows_out[:, start:end], rows_in, self._rows)
            start = end
        return y


@torch.inference_mode()
def find_adaptable_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The linear layers that see every token of a batch once and in order, by name, with their sizes: not the output
    layer, nor experts that get tokens of their own. None of a model that cannot run, of which the proof will say why.
    The model must be as transformers made it."""
    calls: Counter[str] = Counter()
    found: dict[str, tuple[int, int]] = {}
    hooks = []

    def watch(name: str, sizes: tuple[int, int]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def called(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            calls[name] += 1
            if arguments and arguments[0].shape[:-1].numel() == PROBE_TOKENS:
                found[name] = sizes

        return called

    for name, module in model.named_modules():
        sizes = _sizes(module)
        if sizes and module is not model.get_output_embeddings():
            hooks.append(module.register_forward_pre_hook(watch(name, sizes)))
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    try:
        model(input_ids=ids, use_cache=False)
    except Exception:
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sizes for name, sizes in found.items() if calls[name] == 1}


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return (module.nx, module.nf) if isinstance(module, Conv1D) else None
