"""Runs a model with few of its layers, for warm-up: layers of one kind launch the same kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@contextmanager
def distinct_layers(model: PreTrainedModel) -> Iterator[int]:
    """Make the model run its first layers only, up to the first one of the last kind. Yields their number.

    The first layer is a kind of its own, since fused layers add a residual from the second one on. The outputs are
    meaningless. A model whose list of layers is not found runs all of them.
    """
    owner, name, layers = _layer_list(model)
    if owner is None:
        yield 0
        return
    kinds = [(index == 0, _kind(layer)) for index, layer in enumerate(layers)]
    count = 1 + max(map(kinds.index, kinds))
    setattr(owner, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield count
    finally:
        setattr(owner, name, layers)


def _layer_list(model: PreTrainedModel) -> tuple[nn.Module | None, str, nn.ModuleList]:
    """Return the module that owns the list of decoder layers, the list's name, and the list."""
    total = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == total > 0:
                return module, name, child
    return None, "", nn.ModuleList()


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return the properties of a layer that its kernels may depend on: those of its modules and parameters."""
    modules = [(name, type(module), _settings(module)) for name, module in layer.named_modules()]
    parameters = [(name, value.shape, value.dtype) for name, value in layer.named_parameters()]
    return (*modules, *parameters)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
    return tuple(sorted((name, repr(value)) for name, value in plain.items() if name != "layer_idx"))
