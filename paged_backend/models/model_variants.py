"""The variants in which a model can run, from the fastest to the unmodified one of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.models import few_rows
from paged_backend.models.attention import AttentionSpec
from paged_backend.models.batch_invariance import convert_on_gpu, convert_parameters
from paged_backend.models.decoder import FusedDecoder
from paged_backend.models.experts import convert_experts
from paged_backend.models.fusion import fuse, output_layer
from paged_backend.models.linear import Weight, WeightPacker, convert_linears, is_convertible, release
from paged_backend.models.overrides import Overrides, has_custom_forward, use
from paged_backend.models.quantization import Quantizer


class ModelVariant(NamedTuple):
    """A variant of the model: what its modules run, and the weights that they do not use."""

    name: str
    overrides: Overrides
    unused: Sequence[Tensor] = ()  # weights that have been replaced by packed or quantized copies
    weight_bits: int | None = None  # bits to which this variant rounds weights
    is_stored: bool = False  # whether it has the quantized weights of the files, which the model's own are rounded from
    int8_rows: bool = False  # whether activations are rounded to 8 bits
    is_intermediate: bool = False  # whether it is to be verified, but not used
    obstacle: str | None = None  # why the layers are not fused, if they cannot be
    lacks_memory: bool = False  # whether this or a faster variant has weights that were not packed for lack of memory

    @property
    def layers(self) -> str:
        """The form of the layers. The variant that has it with the model's own weights has the same name."""
        return self.name.partition(",")[0]

    @property
    def is_quantized(self) -> bool:
        """Whether weights are rounded, or were quantized in the files."""
        return self.weight_bits is not None or self.is_stored

    def release_unused(self, model: PreTrainedModel) -> Callable[[], None]:
        """Free the unused weights. Returns a function that restores them."""
        return release(model, self.unused)


def model_variants(
    model: PreTrainedModel,
    base: Overrides,
    specs: Sequence[AttentionSpec],
    quantizer: Quantizer | None,
    *,
    batch_invariant: bool = False,
) -> Iterator[ModelVariant]:
    """Yield the variants of a model, for `use`. base: overrides that all of them have.

    A quantizer that rounds weights gives two variants: an intermediate one with the model's own weights, then one with
    rounded weights. With `batch_invariant`, all other variants multiply in the C++ kernels only. On a GPU it gives a
    single variant, which multiplies in `invariant_linear`.

    A variant is built when it is asked for. Before that, the previous one is taken out of use and emptied: only one
    variant has copies of weights in memory at a time.
    """
    use(model, {})
    fused = fuse(model, specs, base)
    decoder, obstacle = (None, fused) if isinstance(fused, str) else (fused, None)
    if batch_invariant and model.device.type == "cuda":
        overrides = base | convert_on_gpu(model, fused)
        yield ModelVariant("fused, with one order of sums for any number of rows", overrides)
        return
    builder = _Builder(model, base, batch_invariant)
    for variant in builder.quantized(decoder, quantizer) if quantizer else builder.variants(decoder):
        yield variant._replace(obstacle=obstacle, lacks_memory=builder.lacks_memory)
        use(model, {})
        variant.overrides.clear()


class _Builder:
    """Builds the variants of a model. The model is in none of them while one is built."""

    def __init__(self, model: PreTrainedModel, base: Overrides, batch_invariant: bool) -> None:
        self._model, self._base = model, base
        self._batch_invariant = batch_invariant
        self.lacks_memory = False  # whether a weight was not packed for lack of memory

    def quantized(self, decoder: FusedDecoder | None, quantizer: Quantizer) -> Iterator[ModelVariant]:
        """Yield the variants with quantized weights. If the files have them, all other variants follow."""
        plain = self._plain(decoder)
        if quantizer.bits:
            yield plain._replace(is_intermediate=True)
        overrides = self._converted(decoder, quantizer)
        if quantizer.replaced:
            yield ModelVariant(
                f"{plain.name}, with {quantizer.description}",
                overrides,
                quantizer.replaced,
                quantizer.bits,
                is_stored=quantizer.bits is None,
                int8_rows=quantizer.int8_rows,
            )
        elif quantizer.bits:  # all weights are too small
            yield ModelVariant(plain.name, overrides, weight_bits=quantizer.bits)
        if quantizer.bits is None:
            overrides.clear()
            quantizer.replaced.clear()
            yield from self.variants(decoder)

    def variants(self, decoder: FusedDecoder | None) -> Iterator[ModelVariant]:
        """Yield the fused variants, if there is a fused decoder, and the others."""
        for form in (decoder, None) if decoder else (None,):
            if self._model.device.type == "cpu":
                yield from self._packed(form)
            elif form and self._model.dtype in few_rows.DTYPES:
                faster = few_rows.with_few_rows(form, few_rows.measure_on_gpu)
                if faster:
                    yield self._plain(faster)._replace(name="fused, with one launch for few rows")
            if not self._batch_invariant:
                yield self._plain(form)

    def _packed(self, decoder: FusedDecoder | None) -> Iterator[ModelVariant]:
        """Yield the variant with packed copies of the weights, if there are any."""
        packer = WeightPacker(batch_invariant=self._batch_invariant)
        overrides = self._converted(decoder, packer)
        self.lacks_memory |= packer.lacks_memory
        if packer.changed:
            yield ModelVariant(f"{self._plain(decoder).name}, with packed weights", overrides, packer.replaced)

    def _plain(self, decoder: FusedDecoder | None) -> ModelVariant:
        """Return the variant without converted weights: the fused decoder if there is one, else the unmodified
        model."""
        if decoder is None:
            return ModelVariant("unmodified", dict(self._base))
        return ModelVariant("fused", self._base | {(decoder.module, "forward"): decoder})

    def _converted(self, decoder: FusedDecoder | None, convert: Callable[[Tensor], Weight]) -> Overrides:
        """Make all linear layers multiply by converted weights."""
        overrides = dict(self._base)
        if decoder:
            decoder = decoder.with_weights(lambda weight, _: convert(weight))
            overrides[decoder.module, "forward"] = decoder
        linears = [module for module in self._running(decoder) if is_convertible(module)]
        overrides |= convert_linears([linear for linear in linears if (linear, "forward") not in overrides], convert)
        if decoder:
            overrides[decoder.module, "forward"] = replace(decoder, head=output_layer(self._model, overrides))
        overrides |= convert_experts(self._model, convert)
        if self._batch_invariant:
            overrides |= convert_parameters(self._model, overrides, WeightPacker(batch_invariant=True))
        return overrides

    def _running(self, decoder: FusedDecoder | None) -> Iterator[nn.Module]:
        """Yield the modules that run their own code, which excludes modules that fused layers replace."""
        modules: list[nn.Module] = [self._model]
        while modules:
            module = modules.pop()
            if decoder and module is decoder.module:
                modules += decoder.called_modules
            elif not has_custom_forward(module):
                yield module
                modules += module.children()
