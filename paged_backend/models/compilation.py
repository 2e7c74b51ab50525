"""What lies between the attentions, through torch.compile.

`pre` and `post` of `fusion.py` are functions of their weights, so one compiled code serves all layers. Each is compiled
twice while the model loads, for one token and for any other number of them, and never while serving. The results are
kept in torch's own cache on disk, under the user's cache directory, so that a server that starts again finds them.

It is meant for a GPU, where it has not been run yet. On a CPU it gains nothing: a call of compiled code costs 10 to 30
µs more than it saves, and weights stay as they are (`linear.py`).
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_backend.models.fusion import Fused, Parts, post, pre

log = logging.getLogger("paged_llm")

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own name for it; what is set there holds
MANY = 64  # tokens to compile for, in the place of any number above 1
VARIANTS = 64  # of one function in a process: a server may hold several models


def cache_directory() -> Path:
    """Where compiled code is kept: what the environment says, or a directory of the user's. torch itself puts a
    directory for temporary files into the environment when it is first asked: that is nobody's wish."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # takes seconds

    if os.environ.get(CACHE) in (None, "", default_cache_dir()):
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        os.environ[CACHE] = str(Path(cache).expanduser() / "paged_llm" / "inductor")
    return Path(os.environ[CACHE])


def compile_parts(fused: Fused) -> Parts | None:
    """`pre` and `post` compiled for the model's layers, or None, with a log line, where that fails."""
    import torch._dynamo
    import torch._inductor.config

    started = time.perf_counter()
    directory = cache_directory()
    # Worker processes would be started with sys.executable, which in a server's stub is not this interpreter.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    parts = Parts(torch.compile(pre, fullgraph=True), torch.compile(post, fullgraph=True))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for count in (MANY, 1):
            _run(parts, fused, count)
    except Exception as error:  # no compiler, no room on the disk, an operation that it does not know
        reason = str(error).strip().partition("\n")[0]
        log.warning("not compiled: %s: %s", type(error).__name__, reason)
        return None
    log.info("compiled in %.1f s; kept in %s", time.perf_counter() - started, directory)
    return parts


@torch.inference_mode()
def _run(parts: Parts, fused: Fused, count: int) -> None:
    """Both parts over `count` tokens, of each kind of layer that the model has."""
    seen: set[Any] = set()
    for layer in fused.layers:
        kind = tuple(None if one is None else getattr(one, "shape", one) for one in (*layer.before, *layer.after))
        if kind in seen:
            continue
        seen.add(kind)
        output, residual, attended = (_rows(count, width, layer.before[0]) for width in layer.widths)
        parts.pre(output, residual, *layer.before)
        parts.post(attended, residual, *layer.after)


def _rows(count: int, width: int, like: Tensor) -> Tensor:
    rows = torch.zeros((count, width), dtype=like.dtype, device=like.device)
    if count > 1:
        torch._dynamo.mark_dynamic(rows, 0)
    return rows
