"""The forms in which a model can run, from the fastest to the one that transformers gave it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.attention import AttentionSpec
from paged_backend.compilation import compile_parts
from paged_backend.fusion import Fused, Parts, fuse
from paged_backend.linear import Packer, Weight, linears, quantize, quantize_all, replace

log = logging.getLogger("paged_llm")


def forms(
    model: PreTrainedModel, specs: Sequence[AttentionSpec], *, compile_level: int, quantized: bool
) -> Iterator[str]:
    """Puts the model into one form after the other, and says which; it stays in the one at which the caller stops.
    `quantized`: there is one only, with weights of 8 bits in the place of its own."""
    fused = fuse(model, specs)
    if isinstance(fused, str):
        log.log(
            logging.WARNING if compile_level else logging.INFO,
            "%s is neither fused nor compiled: %s",
            type(model).__name__,
            fused,
        )
    if quantized:
        if isinstance(fused, Fused):
            fused.use(Parts(), quantize)
        quantize_all(model)
        yield f"{'as it comes' if isinstance(fused, str) else 'fused'}, its weights in 8 bits"
        return
    if isinstance(fused, Fused):
        parts = compile_parts(fused) if compile_level else None
        if parts is not None:
            fused.use(parts)
            yield "compiled"
        if model.device.type == "cpu":
            yield from _packed(model, lambda make: fused.use(Parts(), make), "fused")
        fused.use(Parts())
        yield "fused"
        fused.undo()
    if model.device.type == "cpu":
        yield from _packed(model, lambda make: None, "as it comes")
    yield "as it comes"


def _packed(model: PreTrainedModel, use: Callable[[Callable[[Tensor], Weight]], None], form: str) -> Iterator[str]:
    """The form with the weights that `use` puts into it, and those of the model's other linear layers, packed; none
    where that is no faster."""
    make = Packer()
    use(make)
    undo = replace(list(linears(model)), make)
    if make.changed:
        yield f"{form}, its weights packed"
    undo()
