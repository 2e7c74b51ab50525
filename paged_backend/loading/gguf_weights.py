"""The quantized weights of a GGUF file, which the CPU kernels multiply as they are.

transformers converts the weights to a floating-point type. This module finds the file's tensor for each linear layer,
and compares both, because the conversion of some architectures reorders rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.loading.gguf_blocks import Blocks, decode, join
from paged_backend.models.linear import GroupedCopy, Weight, WeightPacker
from paged_kernels.cpu.packed_linear import pack_quantized

log = logging.getLogger("paged_llm")

# Maximum difference between the file's weights and the model's, relative to the largest of a row. bfloat16 rounds by
# 0.004.
MAX_DIFFERENCE = 0.01


class GgufQuantizer:
    """Replaces weights by those of the GGUF file from which the model was loaded."""

    description = "the GGUF file's weights"
    bits: int | None = None

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        """Raises ImportError without the package gguf."""
        import gguf

        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields["general.architecture"].contents()
        archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = model.config.get_text_config().num_hidden_layers
        arch = archs.get(architecture)
        self._names = None if arch is None else gguf.get_tensor_name_map(arch, layers)
        self._model = model
        self._packer = WeightPacker()
        self.replaced = self._packer.replaced

    def __call__(self, weight: Tensor) -> Weight:
        """Return the file's weight in the layout of the CPU kernels.

        A weight that the file does not have in a supported format is packed as it is.
        """
        parts = [self._find(name, module) for name, module in self._layers_of(weight)]
        found = [part for part in parts if part is not None]
        if not parts or len(found) < len(parts):
            return self._packer(weight)
        blocks = join(found)
        self.replaced.append(weight)
        scales, mins = blocks.scales.half(), None if blocks.mins is None else blocks.mins.half()
        return GroupedCopy(pack_quantized(blocks.codes, scales, mins, blocks.block_inputs, blocks.bits))

    def _layers_of(self, weight: Tensor) -> list[tuple[str, nn.Linear]]:
        """Return the linear layers whose weights are this one or parts of it, in the order of its rows."""

        def offset(layer: nn.Linear) -> int:
            own = layer.weight.data
            same = own.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            return own.storage_offset() - weight.storage_offset() if same else -1

        linears = [(name, one) for name, one in self._model.named_modules() if type(one) is nn.Linear]
        inside = [(name, layer) for name, layer in linears if 0 <= offset(layer) < weight.numel()]
        return sorted(inside, key=lambda pair: offset(pair[1]))

    def _find(self, name: str, layer: nn.Linear) -> Blocks | None:
        """Return the file's weight of a layer, with the rows in the model's order; None if there is none."""
        stored = self._tensors.get(f"{self._names.get_name(name)}.weight") if self._names else None
        if stored is None and layer is self._model.get_output_embeddings():
            stored = self._tensors.get("token_embd.weight")  # shared with the embedding
        if stored is None or stored.data.dtype != np.uint8:
            return None
        blocks = decode(torch.from_numpy(np.array(stored.data)), stored.tensor_type.name)
        if blocks is None or blocks.codes.shape != layer.weight.shape:
            return None
        weight, plain = layer.weight.data.float(), blocks.dequantize()
        tolerance = MAX_DIFFERENCE * weight.abs().amax(1, keepdim=True)
        for rows in self._orders(layer):
            if ((plain[rows] - weight).abs() <= tolerance).all():
                return blocks.select(rows)
        log.warning("%s: differs from %s in the GGUF file, and is not kept quantized", name, stored.name)
        return None

    def _orders(self, layer: nn.Linear) -> Iterator[Tensor]:
        """Yield orders in which the file may hold the rows: the model's, and that of llama.cpp's rotary embeddings, in
        which the two halves of a head alternate."""
        rows = torch.arange(layer.out_features)
        yield rows
        config = self._model.config.get_text_config()
        for heads in dict.fromkeys((config.num_attention_heads, config.num_key_value_heads)):
            if layer.out_features % (2 * heads) == 0:
                yield rows.view(heads, -1, 2).transpose(1, 2).flatten()
