"""The quantized weights of a GGUF file.

transformers converts them to a floating-point type. Scales and minima are rounded to float16, which the formats in "K"
do not store themselves: they are products of a float16 and an integer of 6 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from paged_backend.loading.gguf_blocks import decode
from paged_backend.loading.quantized_blocks import Blocks


class GgufWeights:
    """The quantized weights of a GGUF file, by the names of the model's weights."""

    format = "GGUF"

    def __init__(self, path: Path, config: PretrainedConfig) -> None:
        """Raises ImportError without the package gguf."""
        import gguf

        reader = gguf.GGUFReader(path)
        quantized = [one for one in reader.tensors if one.data.dtype == np.uint8 and one.tensor_type.name != "BF16"]
        self._tensors = {tensor.name: tensor for tensor in quantized}
        self.sizes = {name: (int(one.n_elements), int(one.n_bytes)) for name, one in self._tensors.items()}
        architecture = reader.fields["general.architecture"].contents()
        archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        self._config = config.get_text_config()
        arch = archs.get(architecture)
        self._names = None if arch is None else gguf.get_tensor_name_map(arch, self._config.num_hidden_layers)

    def find(self, name: str) -> str | None:
        """Return the name of a weight in the file, or None if it is not quantized there."""
        module = name.removesuffix(".weight")
        stored = f"{self._names.get_name(module)}.weight" if self._names else ""
        return stored if stored in self._tensors else None

    def read(self, name: str) -> Iterator[Blocks]:
        """Yield a weight in all orders of rows; nothing if its format is not supported."""
        stored = self._tensors[name]
        if stored.data.ndim != 2:  # of experts
            return
        blocks = decode(torch.from_numpy(np.array(stored.data)), stored.tensor_type.name)
        if blocks is not None:
            rounded = blocks.with_half_scales()
            yield from (rounded.select(rows) for rows in self._orders(len(blocks.codes)))

    def _orders(self, num_rows: int) -> Iterator[Tensor]:
        """Yield orders in which the file may hold the rows: the model's, and that of llama.cpp's rotary embeddings, in
        which the two halves of a head alternate."""
        rows = torch.arange(num_rows)
        yield rows
        for heads in dict.fromkeys((self._config.num_attention_heads, self._config.num_key_value_heads)):
            if num_rows % (2 * heads) == 0:
                yield rows.view(heads, -1, 2).transpose(1, 2).flatten()
