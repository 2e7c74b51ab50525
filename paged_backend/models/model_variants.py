"""The variants in which a model can run, from the fastest to the unmodified one of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.models import few_rows
from paged_backend.models.attention import AttentionSpec
from paged_backend.models.batch_invariance import replace_parameters
from paged_backend.models.experts import replace_experts
from paged_backend.models.fusion import FusedModel, fuse
from paged_backend.models.gpu_invariance import install_invariant
from paged_backend.models.linear import Weight, WeightPacker, plain_linears, release, replace_forwards
from paged_backend.models.quantization import Quantizer

log = logging.getLogger("paged_llm")


class ModelVariant(NamedTuple):
    """A variant of the model, and the weights that it does not use."""

    name: str
    unused: Sequence[Tensor] = ()  # weights that have been replaced by packed or quantized copies
    weight_bits: int | None = None  # bits to which this variant rounds weights
    is_stored: bool = False  # whether weights are those of the files, which the model's are rounded from
    int8_rows: bool = False  # whether activations are rounded to 8 bits
    is_intermediate: bool = False  # whether it is to be verified, but not used
    obstacle: str | None = None  # why the layers are not fused, if they cannot be
    lacks_memory: bool = False  # whether this or a faster variant has weights that were not packed for lack of memory

    @property
    def layers(self) -> str:
        """The form of the layers, which is also the name of the variant that has them with the model's own weights."""
        return self.name.partition(",")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether weights are rounded, or those of quantized files."""
        return self.weight_bits is not None or self.is_stored

    def release_unused(self, model: PreTrainedModel) -> Callable[[], None]:
        """Free the unused weights. Returns a function that restores them."""
        return release(model, self.unused)


def model_variants(
    model: PreTrainedModel,
    specs: Sequence[AttentionSpec],
    quantizer: Quantizer | None,
    *,
    batch_invariant: bool = False,
) -> Iterator[ModelVariant]:
    """Put the model into one variant after the other and yield each. The model stays in the last one yielded.

    With a quantizer that rounds weights, these are a variant with the model's weights, which is intermediate, and one
    with rounded weights. With `batch_invariant`, all other variants multiply in the C++ kernels only, and on a
    GPU there is one, which multiplies in `invariant_linear`.
    """
    fused = fuse(model, specs)
    obstacle = fused if isinstance(fused, str) else None
    lacking: list[bool] = []
    for variant in _variants(model, fused, quantizer, lacking, batch_invariant=batch_invariant):
        yield variant._replace(obstacle=obstacle, lacks_memory=any(lacking))


def _variants(
    model: PreTrainedModel,
    fused: FusedModel | str,
    quantizer: Quantizer | None,
    lacking: list[bool],
    *,
    batch_invariant: bool,
) -> Iterator[ModelVariant]:
    if batch_invariant and model.device.type == "cuda":
        install_invariant(model, fused)
        yield ModelVariant("fused, with one order of sums for any number of rows")
        return

    def use_plain(convert: Callable[[Tensor], Weight]) -> Callable[[], None]:
        undo_linears = replace_forwards(list(plain_linears(model)), convert)
        undo_experts = replace_experts(model, convert)
        packer = WeightPacker(batch_invariant=True)
        undo_parameters = replace_parameters(model, packer) if batch_invariant else lambda: None

        def undo() -> None:
            undo_linears()
            undo_experts()
            undo_parameters()

        return undo

    def use(convert: Callable[[Tensor], Weight]) -> Callable[[], None]:
        if isinstance(fused, FusedModel):
            fused.install(convert)
        return use_plain(convert)

    shape = "unmodified" if isinstance(fused, str) else "fused"
    if quantizer and quantizer.bits:
        yield ModelVariant(shape, is_intermediate=True)
        use(quantizer)
        name = f"{shape}, with {quantizer.description}" if quantizer.replaced else shape
        yield ModelVariant(name, quantizer.replaced, quantizer.bits)
        return
    if quantizer:
        undo = use(quantizer)
        if quantizer.replaced:
            name = f"{shape}, with {quantizer.description}"
            yield ModelVariant(name, quantizer.replaced, is_stored=True, int8_rows=quantizer.int8_rows)
        undo()
        quantizer.replaced.clear()
    if isinstance(fused, FusedModel):
        on_gpu = model.device.type == "cuda" and model.dtype in few_rows.DTYPES
        if on_gpu and fused.install_few_rows(few_rows.measure_on_gpu):
            yield ModelVariant(f"{shape}, with one launch for few rows")
        yield from _packed(model, use, shape, lacking, batch_invariant=batch_invariant)
        fused.install()
        if not batch_invariant:
            yield ModelVariant(shape)
        fused.uninstall()
        shape = "unmodified"
    yield from _packed(model, use_plain, shape, lacking, batch_invariant=batch_invariant)
    if not batch_invariant:
        yield ModelVariant(shape)


def _packed(
    model: PreTrainedModel,
    use: Callable[[Callable[[Tensor], Weight]], Callable[[], None]],
    shape: str,
    lacking: list[bool],
    *,
    batch_invariant: bool,
) -> Iterator[ModelVariant]:
    """Yield the variant with packed copies of the weights, on a CPU and if any copy is faster."""
    if model.device.type != "cpu":
        return
    packer = WeightPacker(batch_invariant=batch_invariant)
    undo = use(packer)
    lacking.append(packer.lacks_memory)
    if packer.changed:
        yield ModelVariant(f"{shape}, with packed weights", packer.replaced)
    undo()
