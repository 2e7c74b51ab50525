"""The quantized weights of a GGUF file.

transformers converts them to a floating-point type. Scales and minima are rounded to float16, which the formats in "K"
do not store themselves: they are products of a float16 and an integer of 6 or 8 bits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import is_gguf_available

from paged_backend.files.model_files import GGUF
from paged_backend.loading.gguf_blocks import FORMATS, decode
from paged_backend.loading.load_progress import make_bar
from paged_backend.loading.quantized_blocks import Blocks

# Arrays of a tokenizer, which transformers converts to lists also where it reads only the weights.
UNUSED_FIELDS = ("tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


@contextmanager
def read_quickly(path: Path) -> Iterator[None]:
    """Inside the context, transformers reads a model's GGUF file in a fraction of the time.

    For most architectures, transformers reads the metadata with the package gguf: once for the configuration, once for
    the tokenizer and once for the weights. A vocabulary of 150,000 tokens takes seconds each time. It also makes a
    table of all names of weights for each module, and converts the weights with numpy. Here the metadata are read once,
    there is one table, and `decode` converts the formats that it knows. Does nothing for other files, and without gguf.
    """
    if path.suffix != GGUF or not is_gguf_available():
        yield
        return
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.integrations.gguf import reader as metadata

    read = cache(_reader_type())
    texts: dict[int, str] = {}  # by the identity of their bytes, which the reader keeps
    parse_value, dequantize, read_all = legacy._gguf_parse_value, gguf.dequantize, metadata._read_metadata

    def parse(value: np.ndarray[Any, Any], types: Any) -> Any:
        if types[-1] != gguf.GGUFValueType.STRING:
            return parse_value(value, types)
        if id(value) not in texts:
            texts[id(value)] = value.tobytes().decode()
        return texts[id(value)]

    load_all = legacy.load_gguf_checkpoint
    load_metadata = cache(load_all)

    def load(file: str, return_tensors: bool = False, **options: Any) -> dict[str, Any]:
        if not return_tensors:
            loaded = load_metadata(file)
            return loaded | {"config": copy.deepcopy(loaded["config"])}
        fields = read(file).fields
        unused = {name: fields.pop(name) for name in UNUSED_FIELDS if name in fields}
        try:
            return load_all(file, return_tensors=True, **options)
        finally:
            fields |= unused

    parse_metadata = cache(lambda file, arrays: read_all(metadata._mapped(file), file, arrays))

    def read_metadata(blob: Any, file: str, arrays: Any = ()) -> Any:
        values, *positions = parse_metadata(file, tuple(arrays))
        return dict(values), *positions

    def convert(data: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
        if kind.name not in FORMATS:
            return dequantize(data, kind)
        rows = torch.from_numpy(np.array(data).reshape(-1, data.shape[-1]))
        blocks = decode(rows, kind.name)
        assert blocks
        return blocks.dequantize().view(*data.shape[:-1], -1).numpy()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(gguf, "GGUFReader", lambda file, *mode: read(str(file), *mode)))
        stack.enter_context(mock.patch.object(gguf, "dequantize", convert))
        stack.enter_context(mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        stack.enter_context(mock.patch.object(metadata, "_read_metadata", read_metadata))
        stack.enter_context(mock.patch.object(legacy, "_gguf_parse_value", parse))
        stack.enter_context(mock.patch.object(legacy, "load_gguf_checkpoint", load))
        stack.enter_context(mock.patch.object(legacy, "tqdm", partial(make_bar, legacy.tqdm)))
        yield


@cache
def _reader_type() -> type:
    """Return a reader that takes a tenth of the time for arrays: it slices an array instead of a memmap, and reads the
    elements of arrays without a call for each."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        data: Any

        def _get(self, *arguments: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*arguments, **options)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            kind, count, begin = GGUFValueType(item[0]), int(length[0]), orig_offs + 12
            if kind == GGUFValueType.STRING:
                parts, end = self._strings(begin, count)
                indices = list(range(3, 3 + 2 * count, 2))
            elif kind in self.gguf_scalar_to_np:
                values = self._get(begin, self.gguf_scalar_to_np[kind], count)
                parts, end = [values[index : index + 1] for index in range(count)], begin + values.nbytes
                indices = list(range(2, 2 + count))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [GGUFValueType.ARRAY, *([kind] if count else [])]
            return end - orig_offs, [item, length, *parts], indices, types

        def _strings(self, begin: int, count: int) -> tuple[list[Any], int]:
            parts, data, offset = list[Any](), self.data, begin
            for _ in range(count):
                length = data[offset : offset + 8].view(np.uint64)
                offset += 8 + (size := int(length[0]))
                parts += (length, data[offset - size : offset])
            return parts, offset

    return Reader


class GgufWeights:
    """The quantized weights of a GGUF file, by the names of the model's weights."""

    format = "GGUF"

    def __init__(self, path: Path, config: PretrainedConfig) -> None:
        """Raises ImportError without the package gguf."""
        import gguf

        reader = gguf.GGUFReader(path)
        quantized = [
            tensor for tensor in reader.tensors if tensor.data.dtype == np.uint8 and tensor.tensor_type.name != "BF16"
        ]
        self._tensors = {tensor.name: tensor for tensor in quantized}
        self.sizes = {name: (int(tensor.n_elements), int(tensor.n_bytes)) for name, tensor in self._tensors.items()}
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
        if stored.data.ndim != 2:  # weights of experts
            return
        blocks = decode(torch.from_numpy(np.array(stored.data)), stored.tensor_type.name)
        if blocks is not None:
            rounded = blocks.with_half_scales()
            yield rounded
            yield from (rounded.select(rows) for rows in self._orders(len(blocks.codes)))

    def _orders(self, num_rows: int) -> Iterator[Tensor]:
        """Yield the orders of rows in files of llama.cpp with rotary embeddings: the two halves of a head alternate."""
        rows = torch.arange(num_rows)
        for heads in dict.fromkeys((self._config.num_attention_heads, self._config.num_key_value_heads)):
            if num_rows % (2 * heads) == 0:
                yield rows.view(heads, -1, 2).transpose(1, 2).flatten()
