"""Quantized weights of a model's files, which the CPU kernels multiply as they are.

The model is built with weights in a floating-point type. This module finds the stored weight of each linear layer and
of each expert, or the shard of this rank, and compares both: some conversions of transformers reorder rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.api.sizes import MIB
from paged_backend.files.model_files import SUFFIX
from paged_backend.loading.quantized_blocks import Blocks, pack_joined
from paged_backend.models.linear import CONVERTIBLE, JoinedWeight, Weight, WeightPacker, linear_sizes
from paged_backend.utils.startup import Progress

log = logging.getLogger("paged_llm")

COMPARED = 256  # first and last inputs of a weight that are compared, a multiple of the size of most blocks
# Maximum difference between the stored weights and the model's, relative to the largest of a row. bfloat16 rounds by
# 0.004.
MAX_DIFFERENCE = 0.01
NUM_SHOWN = 3  # weights that a message names

# Names of the projections of an expert in files, joined in transformers.
EXPERTS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}
EXPERT_MODULES = (".mlp.experts", ".block_sparse_moe.experts")  # in the model, and in the files of Mixtral


class StoredWeights(Protocol):
    """The quantized weights of a model's files."""

    format: str  # "GGUF"

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """The number of elements and bytes of each quantized weight, by its name in the files."""
        ...

    def find(self, name: str) -> str | None:
        """Return the name of a weight in the files, or None if it is not quantized there."""
        ...

    def read(self, name: str) -> Iterator[Blocks]:
        """Yield a weight of the files, with its rows in all orders that the model may have."""
        ...


class Found(NamedTuple):
    """A stored weight, and where the model has it."""

    name: str  # in the files
    parameter: nn.Parameter
    blocks: Blocks  # the part of this rank


class StoredQuantizer:
    """Replaces a model's weights by the quantized ones of its files."""

    bits: int | None = None

    def __init__(
        self,
        stored: StoredWeights,
        model: PreTrainedModel,
        rank: int = 0,
        ranks: int = 1,
        *,
        int8_rows: bool,
        batch_invariant: bool = False,
    ) -> None:
        """int8_rows: round activations to 8 bits before they are multiplied."""
        self.description = f"the {stored.format} weights of the files"
        self.int8_rows = int8_rows
        self._stored, self._model = stored, model
        self._rank, self._ranks = rank, ranks
        self._packer = WeightPacker(batch_invariant=batch_invariant)
        self._kept: dict[str, nn.Parameter] = {}  # by the name in the files
        self._reasons: dict[str, str] = {}
        self.replaced = self._packer.replaced

    def __call__(self, weight: Tensor) -> Weight:
        """Return the stored weight in the layout of the CPU kernels.

        A weight that is not stored in quantized form is packed as it is.
        """
        progress = self._progress
        packed = self._pack(weight)
        progress.advance(weight.numel())
        return packed

    def _pack(self, weight: Tensor) -> Weight:
        parts = self._find_linears(weight) or self._find_expert(weight)
        stored = [part for part in parts if isinstance(part, Found)]
        if not stored:
            return self._packer(weight)
        self.replaced.append(weight)
        self._kept |= {part.name: part.parameter for part in stored}
        if len(stored) == len(parts):
            return pack_joined([part.blocks for part in stored], int8_rows=self.int8_rows)
        # Clones, because a view of the weight would keep all of it in memory.
        return JoinedWeight(
            [
                part.blocks.pack(int8_rows=self.int8_rows) if isinstance(part, Found) else self._packer(part.clone())
                for part in parts
            ]
        )

    def log_widened(self) -> str | None:
        """Log the quantized weights that are in memory in the model's data type, and the memory that this adds.

        Returns the format of the weights that stay quantized, if there are any.
        """
        extra, names = 0, []
        for name, (elements, nbytes) in self._stored.sizes.items():
            parameter = self._kept.get(name)
            if parameter is None or parameter.numel() or not self.replaced:
                extra += elements * self._model.dtype.itemsize - nbytes
                names.append(f"{name} ({self._reasons[name]})" if name in self._reasons else name)
        if not names:
            log.info("all %d quantized weights stay quantized", len(self._stored.sizes))
            return self._stored.format
        more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        log.warning(
            "%d of %d quantized weights are widened to %s, which takes %.1f MiB more%s: %s%s",
            len(names), len(self._stored.sizes), str(self._model.dtype).removeprefix("torch."), extra / MIB,
            " in all ranks together" if self._ranks > 1 else "", ", ".join(names[:NUM_SHOWN]), more,
        )  # fmt: skip
        return self._stored.format if len(names) < len(self._stored.sizes) else None

    @cached_property
    def _progress(self) -> Progress:
        """The progress of packing, which is shown from the first weight on."""
        return Progress("packing weights", sum(linear_sizes(self._model)), "weights")

    @cached_property
    def _linears(self) -> dict[int, list[tuple[str, nn.Linear]]]:
        """The linear layers by the address of their weight's memory, in the order of their rows."""
        linears: dict[int, list[tuple[str, nn.Linear]]] = {}
        for name, layer in self._model.named_modules():
            if type(layer) in CONVERTIBLE and type(layer.weight.data) is Tensor:
                linears.setdefault(layer.weight.data.untyped_storage().data_ptr(), []).append((name, layer))
        for layers in linears.values():
            layers.sort(key=lambda pair: pair[1].weight.data.storage_offset())
        return linears

    def _find_linears(self, weight: Tensor) -> list[Found | Tensor]:
        """Return the stored weights of the linear layers that multiply by this weight or by parts of it, in the order
        of its rows. A layer whose weight is not stored contributes its own."""
        begin = weight.storage_offset()
        inside = [
            (name, layer)
            for name, layer in self._linears.get(weight.untyped_storage().data_ptr(), [])
            if begin <= layer.weight.data.storage_offset() < begin + weight.numel()
        ]
        parts: list[Found | Tensor] = []
        for name, layer in inside:
            stored = self._name_of(name, layer)
            match = None if stored is None else self._match(stored, layer.weight, layer.weight.data)
            parts.append(match or layer.weight.data)
        return parts

    def _name_of(self, name: str, layer: nn.Linear) -> str | None:
        stored = self._stored.find(f"{name}.weight")
        if stored is None and layer is self._model.get_output_embeddings():
            shared = self._model.get_input_embeddings()
            embedding = next(name for name, module in self._model.named_modules() if module is shared)
            return self._stored.find(f"{embedding}.weight")
        return stored

    def _find_expert(self, weight: Tensor) -> list[Found]:
        """Return the stored weights of one linear layer of an expert; empty if they are not stored."""
        for name, parameter in self._model.named_parameters():
            memory = parameter.data
            if memory.dim() != 3 or memory.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                continue
            index = weight.storage_offset() // memory.stride(0)
            module, _, projection = name.rpartition(".")
            if (stored := self._stored.find(name)) is not None:
                match = self._match(stored, parameter, weight, index)
                return [match] if match else []
            places = [module.replace(EXPERT_MODULES[0], place) for place in EXPERT_MODULES]
            for prefix, parts in ((place, parts) for place in places for parts in EXPERTS.get(projection, ())):
                names = [self._stored.find(f"{prefix}.{index}.{part}.weight") for part in parts]
                rows = weight.chunk(len(names))
                if all(names):
                    matches = [self._match(str(n), parameter, part) for n, part in zip(names, rows, strict=True)]
                    stored_parts = [match for match in matches if match]
                    return stored_parts if len(stored_parts) == len(matches) else []
        return []

    def _match(self, name: str, parameter: nn.Parameter, weight: Tensor, expert: int | None = None) -> Found | None:
        """Return the stored weight with the values of `weight`, or None."""
        reason = "its format is not supported"
        for whole in self._stored.read(name):
            blocks = self._shard(whole if expert is None else whole.select(expert), weight)
            if blocks is None:
                reason = "its blocks are split by tensor parallelism"
            elif blocks.codes.shape == weight.shape and _is_same(blocks, weight):
                return Found(name, parameter, blocks)
            else:
                reason = "differs from the model's weight"
        self._reasons[name] = reason
        return None

    def _shard(self, blocks: Blocks, weight: Tensor) -> Blocks | None:
        """Return the part of this rank, which has the shape of `weight`. Weights are split as in `torch.chunk`."""
        ranges = []
        for whole, part in zip(blocks.codes.shape, weight.shape, strict=True):
            first = 0 if whole == part else self._rank * -(-whole // self._ranks)
            ranges.append(range(first, min(first + part, whole)))
        return blocks.shard(*ranges)


def _is_same(blocks: Blocks, weight: Tensor) -> bool:
    """Return whether all rows have the values of a weight. Of long rows, the first and last inputs are compared: rows
    and heads may be in another order, single values do not differ."""
    rows, inputs = weight.shape
    ends = [range(inputs)]
    if inputs > 3 * COMPARED:
        ends = [range(COMPARED), range((inputs - 1) // COMPARED * COMPARED, inputs)]
    for columns in ends:
        part, values = blocks.shard(range(rows), columns), weight[:, columns.start : columns.stop].float()
        if part is None:
            part, values = blocks, weight.float()
        tolerance = MAX_DIFFERENCE * values.abs().amax(1, keepdim=True)
        if not ((part.dequantize() - values).abs() <= tolerance).all():
            return False
    return True


def log_dequantized(path: Path, model: PreTrainedModel) -> None:
    """Log that transformers has widened all quantized weights of a model directory, and the memory that this adds."""
    stored = sum(file.stat().st_size for file in path.glob(f"*{SUFFIX}"))
    held = sum(parameter.nbytes for parameter in model.parameters())
    log.warning(
        "all quantized weights are widened to %s on %s, which takes %.1f MiB more",
        str(model.dtype).removeprefix("torch."), model.device.type, (held - stored) / MIB,
    )  # fmt: skip
