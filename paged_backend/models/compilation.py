"""torch.compile for the operations between the attention calls of fused layers.

`pre_attention` and `post_attention` of `fusion.py` take their weights as arguments, so all layers share one compiled
function of each. They are compiled twice while the model loads, for one token and for any larger number, and never
while serving. torch's own disk cache, below the user's cache directory, keeps the result for the next start.

Compilation is intended for GPUs, but has not been measured on one. On a CPU a call of compiled code costs 10 to 30 µs
more than it saves, and compiled code cannot use packed weights (`linear.py`).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged_backend.models.fusion import FusedLayer, FusedModel, LayerFunctions, post_attention, pre_attention
from paged_backend.utils.startup import Progress

log = logging.getLogger("paged_llm")

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # variable that torch reads; takes precedence if set
MANY_TOKENS = 64  # number of tokens with which the dynamic shape is compiled
MAX_VARIANTS = 64  # compiled variants of one function per process, which may serve several models


def cache_directory() -> Path:
    """Return the directory of the compilation cache, and set the environment variable to it.

    torch sets the variable to a directory for temporary files when it first reads it; that value is overridden.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imported here because it takes seconds

    if os.environ.get(CACHE_VARIABLE) in (None, "", default_cache_dir()):
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        os.environ[CACHE_VARIABLE] = str(Path(cache).expanduser() / "paged_llm" / "inductor")
    return Path(os.environ[CACHE_VARIABLE])


def compile_functions(fused: FusedModel) -> LayerFunctions | None:
    """Compile the functions of the model's layers. Logs a warning and returns None if that fails."""
    import torch._dynamo
    import torch._inductor.config

    started = time.perf_counter()
    directory = cache_directory()
    # Compile in this process: sys.executable, with which torch starts workers, is not the interpreter in Triton's stub.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = max(MAX_VARIANTS, torch._dynamo.config.recompile_limit)
    functions = LayerFunctions(
        torch.compile(pre_attention, fullgraph=True), torch.compile(post_attention, fullgraph=True)
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        kinds, counts = _distinct_layers(fused), (MANY_TOKENS, 1)
        progress = Progress("compiling", len(kinds) * len(counts), "layers")
        for count in counts:
            for layer in kinds:
                _run(functions, layer, count)
                progress.advance()
    except Exception as error:  # e.g. no compiler, no disk space, an unsupported operation
        reason = str(error).strip().partition("\n")[0]
        log.warning("torch.compile failed, running uncompiled: %s: %s", type(error).__name__, reason)
        return None
    log.info("compiled in %.1f s; cached in %s", time.perf_counter() - started, directory)
    return functions


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model's layers run compiled functions."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    return any(
        isinstance(layer.forward, FusedLayer) and layer.forward.functions != LayerFunctions() for layer in layers
    )


def _distinct_layers(fused: FusedModel) -> list[FusedLayer]:
    """Return one layer of each kind. Layers of one kind differ only in the values of their weights."""
    found: dict[Any, FusedLayer] = {}
    for layer in fused.layers:
        arguments = (*layer.pre_arguments, *layer.post_arguments)
        kind = tuple(None if value is None else getattr(value, "shape", value) for value in arguments)
        found.setdefault(kind, layer)
    return list(found.values())


@torch.inference_mode()
def _run(functions: LayerFunctions, layer: FusedLayer, count: int) -> None:
    """Run both functions over `count` tokens."""
    output, residual, attended = (_rows(count, width, layer.pre_arguments[0]) for width in layer.widths)
    functions.pre_attention(output, residual, *layer.pre_arguments)
    functions.post_attention(attended, residual, *layer.post_arguments)


def _rows(count: int, width: int, like: Tensor) -> Tensor:
    rows = torch.zeros((count, width), dtype=like.dtype, device=like.device)
    if count > 1:
        torch._dynamo.mark_dynamic(rows, 0)
    return rows
