"""Values of a config.json that no model can have. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError

SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
MAX_LAYERS = 1024  # limit without weight files, which imply a limit otherwise
MAX_POSITIONS = 2**31 - 1
_DTYPE = re.compile(r"(torch\.)?((b?float|u?int|complex)\d*(_\w+)?|half|double|bool|auto)")  # names in torch


def check_values(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size or a data type that no model has. fields: those of the decoder of text."""
    check_counts(file, fields.get, max_layers=MAX_LAYERS)
    check_layer_sizes(file, fields.get, MAX_POSITIONS)
    for name in ("dtype", "torch_dtype"):
        if (value := fields.get(name)) is not None and not (isinstance(value, str) and _DTYPE.fullmatch(value)):
            shown = json.dumps(value)
            raise ConfigError(f'{file}: {name}={shown}: must be the name of a data type of torch, such as "bfloat16"')


def check_counts(file: Path, value_of: Callable[[str], Any], *, max_layers: int) -> None:
    """Raise ConfigError for a wrong number of layers or positions. value_of: returns a field, or None."""
    _check_number(file, value_of, "num_hidden_layers", max_layers)
    _check_number(file, value_of, "max_position_embeddings", MAX_POSITIONS, minimum=2)  # one prompt, one output token


def check_layer_sizes(file: Path, value_of: Callable[[str], Any], maximum: int) -> None:
    """Raise ConfigError for a size of a layer that is not 1 to `maximum`."""
    for field in SIZES:
        _check_number(file, value_of, field, maximum)


def _check_number(file: Path, value_of: Callable[[str], Any], field: str, maximum: int, *, minimum: int = 1) -> None:
    values = value_of(field)
    for value in values if isinstance(values, list) else [values]:  # some models have one value per layer
        if isinstance(value, int) and not minimum <= value <= maximum:
            raise ConfigError(f"{file}: {field}={value}: must be {minimum}..{maximum}")
