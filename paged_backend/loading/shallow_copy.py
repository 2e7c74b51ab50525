"""Copies of some layers of a model, in any data type. They take little time and memory to verify."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.kv.cache import LayerShape

MOST_LAYERS = 12  # maximum first layers in a copy, and maximum later ones
SHARED_LAYERS = "num_kv_shared_layers"  # layers that read the keys and values of another one
ROWS = 1024  # tokens of a copy: the first rows of the embeddings and of the output layer
WINDOW = 8  # sliding window of a copy, if the model's is longer: a short prompt exceeds it


def representative_layers(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> list[int]:
    """Return the layers of a copy that has every kind of layer: the first layers of the model, at most MOST_LAYERS, and
    the first layer of each kind that occurs only later. shapes: what each layer keeps in the KV cache.

    Layers that read the keys and values of another one are left out if they occur later.
    """
    kinds: dict[Any, int] = {}
    for index, (layer, shape) in enumerate(zip(layer_modules(model) or (), shapes, strict=True)):
        kinds.setdefault((_structure(layer), shape), index)
    shares = getattr(model.config.get_text_config(), SHARED_LAYERS, None)
    later = [] if shares else [index for index in kinds.values() if index >= MOST_LAYERS]
    first = range(1 + max(index for index in kinds.values() if index < MOST_LAYERS))
    return [*first, *sorted(later)[:MOST_LAYERS]]


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes kinds of layers: modules and switches, but no weights and no sizes."""
    return tuple(
        (name, type(module).__name__, *((key, value) for key, value in vars(module).items() if type(value) is bool))
        for name, module in layer.named_modules()
    )


def layer_modules(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the decoder layers; None if there is no list of them. In LongCat, a layer counts as two."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and not re.search(r"\d", name):
            return module
    return None


@torch.no_grad()
def shallow_copy(model: PreTrainedModel, indices: Sequence[int], dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy with some of the layers of a model. It knows ROWS tokens, and its windows are at most WINDOW.

    indices: numbers of these layers. dtype: replaces the model's data type. Weights in other data types keep theirs.
    """
    layers = layer_modules(model)
    assert layers is not None
    unused = {id(tensor) for index, layer in enumerate(layers) if index not in indices for tensor in _tensors(layer)}
    tables = {id(tensor) for table in _tables(model) for tensor in table.parameters()}
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        if id(tensor) in unused:
            continue
        data = tensor[:ROWS] if id(tensor) in tables else tensor
        data = data.detach().to(dtype if data.dtype == model.dtype else data.dtype, copy=True)
        memo[id(tensor)] = nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data
    memo[id(layers)] = kept = nn.ModuleList(copy.deepcopy(layers[index], memo) for index in indices)
    for position, index in enumerate(indices):
        for module in kept[position].modules():
            if getattr(module, "layer_idx", None) == index:
                module.layer_idx = position
    result: PreTrainedModel = copy.deepcopy(model, memo)
    for table in _tables(result):
        if isinstance(table, nn.Embedding):
            table.num_embeddings, table.padding_idx = len(table.weight), None
        else:
            table.out_features = len(table.weight)
    config = result.config.get_text_config()
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(layers):  # such as `layer_types`
            setattr(config, name, [value[index] for index in indices])
    config.num_hidden_layers, config.vocab_size = len(indices), min(ROWS, config.vocab_size)
    for owner in (config, *result.modules()):
        window = getattr(owner, "sliding_window", None)
        if isinstance(window, int) and window > WINDOW:
            owner.sliding_window = WINDOW
    return result


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _tables(model: PreTrainedModel) -> list[Any]:
    """Return the modules with a row for each token or position."""
    tables: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    output = model.get_output_embeddings()
    return [*tables, output] if isinstance(output, nn.Linear) else tables
