"""The forms in which a model can run, from the fastest to the one that transformers gave it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from paged_backend.models.attention import AttentionSpec
from paged_backend.models.compilation import compile_parts
from paged_backend.models.fusion import Fused, Parts, fuse
from paged_backend.models.linear import Packer, Quantizer, Weight, linears, release, replace

log = logging.getLogger("paged_llm")


class Form(NamedTuple):
    name: str
    unused: Sequence[Tensor] = ()  # weights that something else stands for

    def settle(self, model: PreTrainedModel) -> Callable[[], None]:
        """Let go of what the model does not use in this form. The function that comes back undoes it."""
        return release(model, self.unused)


def forms(
    model: PreTrainedModel, specs: Sequence[AttentionSpec], *, compile_level: int, quantized: bool
) -> Iterator[Form]:
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

    def use_plain(make: Callable[[Tensor], Weight]) -> Callable[[], None]:
        return replace(list(linears(model)), make)

    def use(make: Callable[[Tensor], Weight]) -> Callable[[], None]:
        if isinstance(fused, Fused):
            fused.use(Parts(), make)
        return use_plain(make)

    shape = "as it comes" if isinstance(fused, str) else "fused"
    if quantized:
        rounded = Quantizer()
        use(rounded)
        yield Form(f"{shape}, its weights in 8 bits", rounded.replaced)
        return
    if isinstance(fused, Fused):
        parts = compile_parts(fused) if compile_level else None
        if parts is not None:
            fused.use(parts)
            yield Form("compiled")
        yield from _packed(model, use, shape)
        fused.use(Parts())
        yield Form(shape)
        fused.undo()
        shape = "as it comes"
    yield from _packed(model, use_plain, shape)
    yield Form(shape)


def _packed(
    model: PreTrainedModel, use: Callable[[Callable[[Tensor], Weight]], Callable[[], None]], shape: str
) -> Iterator[Form]:
    """The form with faster copies of its weights, on a CPU; none where there are no faster ones."""
    if model.device.type != "cpu":
        return
    packer = Packer()
    undo = use(packer)
    if packer.changed:
        yield Form(f"{shape}, its weights packed", packer.replaced)
    undo()
