"""Import transformers without those parts of torch that a process with one rank does not use.

Its modules decorate functions for `torch.compile`, and prepare for distributed tensors. That imports dynamo, inductor
and FSDP, which take 1.9 s of one core and 150 MB in each process (AMD EPYC with AVX-512, November 2026).
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any

import torch

DYNAMO = "torch._dynamo"
MASKS = f"{DYNAMO}._trace_wrapped_higher_order_op"
DECORATORS = {"allow_in_graph", "assume_constant_result", "disable"}


def import_transformers() -> None:
    """Import the modules of transformers that every model needs. Must run before other modules import them.

    They take no part in distributed tensors then. `torch.compile` works, but ignores `torch.compiler.disable` of
    functions that were imported or called before.
    """
    from transformers import utils
    from transformers.utils import import_utils

    for name in ("is_torch_distributed_available", "is_torch_flex_attn_available"):
        for module in (utils, import_utils):
            setattr(module, name, _unavailable)
    disable = torch.compiler.disable
    if DYNAMO not in sys.modules:
        sys.modules |= {DYNAMO: _LateDynamo(DYNAMO), MASKS: _LateMasks(MASKS)}
        torch.compiler.disable = _unchanged
    try:
        import transformers.generation.utils
        import transformers.integrations.moe
        import transformers.masking_utils
        import transformers.modeling_layers  # noqa: F401
    finally:
        torch.compiler.disable = disable
        if isinstance(sys.modules.get(MASKS), _LateMasks):
            del sys.modules[MASKS]


def _unavailable(*args: object) -> bool:
    return False


def _unchanged(function: Any = None, *arguments: object, **options: object) -> Any:
    """Return a function as it is: a decorator that does nothing, with or without arguments."""
    return _unchanged if function is None else function


class _LateDynamo(types.ModuleType):
    """Stands for dynamo until something other than a decorator is used. torch uses decorators whenever it builds a
    model without memory."""

    def __getattr__(self, name: str) -> Any:
        if name in DECORATORS:
            return _unchanged
        if name in ("__path__", "__file__", "__spec__") or not name.startswith("__"):
            if sys.modules.get(DYNAMO) is self:
                del sys.modules[DYNAMO]
            return getattr(import_module(DYNAMO), name)
        raise AttributeError(name)


class _LateMasks(types.ModuleType):
    """Stands for the module of dynamo with the context in which masks with unusual patterns are made."""

    @staticmethod
    def TransformGetItemToIndex() -> Any:
        return import_module(MASKS).TransformGetItemToIndex()
