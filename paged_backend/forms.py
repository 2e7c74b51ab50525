"""The forms in which a model can run, from the fastest to the one that transformers gave it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from paged_backend.attention import AttentionSpec
from paged_backend.compilation import compile_parts
from paged_backend.fusion import Parts, fuse

log = logging.getLogger("paged_llm")


def forms(model: PreTrainedModel, specs: Sequence[AttentionSpec], compile_level: int) -> Iterator[str]:
    """Puts the model into one form after the other, and says which; it stays in the one at which the caller stops."""
    fused = fuse(model, specs)
    if isinstance(fused, str):
        log.log(
            logging.WARNING if compile_level else logging.INFO,
            "%s is neither fused nor compiled: %s",
            type(model).__name__,
            fused,
        )
    else:
        parts = compile_parts(fused) if compile_level else None
        if parts is not None:
            fused.use(parts)
            yield "compiled"
        fused.use(Parts())
        yield "fused"
        fused.undo()
    yield "as it comes"
