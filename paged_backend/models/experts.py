"""Mixtures of experts on a CPU: the experts of a layer are two calls of a kernel, with packed or quantized weights.

transformers keeps the weights of all experts of a layer in one parameter, [experts, out_features, in_features] or
transposed, and calls their module with the rows of a step and the experts of each row. Here the rows are sorted by
expert, so that each expert multiplies consecutive rows:

    chosen   [[2, 0], [0, 3], [2, 1]]         experts of each of three rows
    order    [1, 2, 5, 0, 4, 3]               positions in `chosen`, by expert
    starts   [0, 2, 3, 5, 6]                  where the rows of each expert start
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from paged_backend.models.linear import GroupedCopy, Weight, project
from paged_backend.models.overrides import Overrides, has_custom_forward
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import GROUP


class ExpertProjection:
    """One linear layer of all experts."""

    def __init__(self, weights: list[Weight], biases: Tensor | None, out_features: int) -> None:
        """weights: the weight of each expert. biases: [experts, out_features]."""
        self._weights, self._biases = weights, biases
        self._out_features = out_features
        packed = [weight.packed for weight in weights if isinstance(weight, GroupedCopy)]
        self._native = native.ExpertLinear(packed, biases) if len(packed) == len(weights) else None
        self.can_gate = self._native is not None and out_features % (2 * GROUP) == 0

    def __call__(self, x: Tensor, starts: Tensor, *, gated: bool = False) -> Tensor:
        """Multiply the rows x [rows, in_features], sorted by expert: [rows, out_features].

        Args:
            starts: [experts + 1] int64, where the rows of each expert start.
            gated: return silu(first half) * second half of the products, if `can_gate`.
        """
        if self._native:
            return self._native(x, starts, swiglu=gated)
        product = x.new_empty(len(x), self._out_features)
        for expert, (start, end) in enumerate(pairwise(starts.tolist())):
            if start < end:
                bias = None if self._biases is None else self._biases[expert]
                product[start:end] = project(x[start:end], self._weights[expert], bias)
        return product


class ConvertedExperts:
    """The `forward` of a module of experts whose weights have been converted."""

    def __init__(self, experts: Any, convert: Callable[[Tensor], Weight]) -> None:
        """experts: a module of `expert_modules`."""
        self._experts, self._num_experts = experts, experts.num_experts
        self._up = _projection(experts, "gate_up_proj" if experts.has_gate else "up_proj", convert)
        self._down = _projection(experts, "down_proj", convert)
        self._gated = self._up.can_gate and _is_swiglu(experts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, [rows, hidden].

        Args:
            hidden_states: [rows, hidden].
            top_k_index: [rows, top_k] int64, the experts of each row.
            top_k_weights: [rows, top_k], their weights.
        """
        num_rows, top_k = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        starts = F.pad(chosen.bincount(minlength=self._num_experts).cumsum(0), (1, 0))
        activated = self._up(hidden_states[order // top_k], starts, gated=self._gated)
        if not self._gated:
            activated = (
                self._experts._apply_gate(activated) if self._experts.has_gate else self._experts.act_fn(activated)
            )
        outputs = self._down(activated, starts)
        if getattr(self._experts, "has_post_expert_norm", False):
            outputs = self._experts.post_expert_norm(outputs)
        outputs = outputs * top_k_weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return outputs[back].view(num_rows, top_k, -1).sum(1).to(hidden_states.dtype)


def expert_modules(model: nn.Module) -> Iterator[Any]:
    """Return the modules of experts on a CPU with the interface of transformers (`use_experts_implementation`)."""
    return filter(_is_convertible, model.modules())


def _is_convertible(module: Any) -> bool:
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts")):
        return False
    if has_custom_forward(module) or getattr(module, "_is_expert_parallel", False):
        return False
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return bool(weights) and all(
        type(weight.data) is Tensor and weight.device.type == "cpu" and len(weight) == module.num_experts
        for weight in weights
    )


def convert_experts(model: nn.Module, convert: Callable[[Tensor], Weight]) -> Overrides:
    """Make mixtures of experts multiply by converted weights."""
    return {(module, "forward"): ConvertedExperts(module, convert) for module in expert_modules(model)}


def _projection(experts: Any, name: str, convert: Callable[[Tensor], Weight]) -> ExpertProjection:
    parameter = getattr(experts, name)
    if experts.is_transposed:  # the same values in another layout, so that the weight of an expert is dense
        parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
    weight = parameter.data.transpose(1, 2) if experts.is_transposed else parameter.data
    biases = getattr(experts, f"{name}_bias").data if experts.has_bias else None
    return ExpertProjection([convert(expert) for expert in weight], biases, weight.shape[1])


def _is_swiglu(experts: Any) -> bool:
    return bool(
        experts.has_gate
        and getattr(experts, "is_concatenated", False)
        and type(experts)._apply_gate is getattr(moe, "_default_apply_gate", None)
        and type(experts.act_fn) is type(ACT2FN["silu"])
    )
