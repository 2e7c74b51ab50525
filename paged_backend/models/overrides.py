"""What modules of transformers run in place of their own code: the only place in which it is replaced.

    own          the module's `forward`, and its weights
    variant      packed batches of recurrent mixers, latent attention,       `use`: until another variant is used
                 fused layers, packed and quantized weights
    step         adapters of its rows                                        `overridden`: inside of a context

`model_variants.py` makes the tables of variants, and `vars(module)` shows what a module runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

# The values of attributes of modules, by module and name. Most are functions in place of `forward`.
Overrides: TypeAlias = "dict[tuple[nn.Module, str], Any]"

OWN = "_own_attributes"  # attribute of a model: its modules' own values of the attributes that are overridden


def use(model: nn.Module, overrides: Overrides) -> None:
    """Make the modules of a model run these overrides, in place of the overrides of an earlier call."""
    _assign(vars(model).pop(OWN, {}))
    vars(model)[OWN] = _values(overrides)
    _assign(overrides)


@contextmanager
def overridden(overrides: Overrides) -> Iterator[None]:
    """Make modules run these overrides inside the context, in place of what they run outside."""
    before = _values(overrides)
    try:
        _assign(overrides)
        yield
    finally:
        _assign(before)


def has_custom_forward(module: nn.Module) -> bool:
    """Return whether the module's forward function has been replaced, or has hooks."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)


def _values(overrides: Overrides) -> Overrides:
    """Return the present values; None for an attribute that the class of its module provides."""
    return {(module, name): _attributes(module, name).get(name) for module, name in overrides}


def _assign(values: Mapping[tuple[nn.Module, str], Any]) -> None:
    for (module, name), value in values.items():
        if value is None:
            _attributes(module, name).pop(name, None)
        else:
            _attributes(module, name)[name] = value


def _attributes(module: nn.Module, name: str) -> dict[str, Any]:
    return module._parameters if name in module._parameters else vars(module)
