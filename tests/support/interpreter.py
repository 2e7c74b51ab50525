"""Triton's interpreter, without work that it repeats. Import it after Triton, for the interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_dtypes: dict[str, np.dtype[Any]] = {}


def speed_up() -> None:
    """Leave out what costs much of the time and changes no result."""
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _cached_np_dtype
    # Without the debug option, each sum of integers is computed again for a check whose result is not used.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _patch_lang_once(function: Any) -> Any:
    """Replace the operations that a function sees, unless its caller has seen and replaced the same ones."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return _patch_lang(function) if any(tl.core.is_builtin(module.load) for module in seen) else None


def _cached_np_dtype(dtype: Any) -> np.dtype[Any]:
    """Return numpy's type of a type, which has been looked up before in most cases."""
    if dtype.name not in _dtypes:
        _dtypes[dtype.name] = _get_np_dtype(dtype)
    return _dtypes[dtype.name]
