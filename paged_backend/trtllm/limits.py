"""Limits of the models in front of the engine: parameters of their config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.api.limits import InputLimits, limit
from paged_backend.api.options import parse_fields


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """The limits of one model. The engine checks its own limits in addition."""

    max_open_rows: int = limit(1024, "open rows of all requests; a request with more is rejected as `UNAVAILABLE`")
    max_biases: int = limit(1024, "words in `embedding_bias_words`, or tokens in `embedding_bias`, per row")
    max_frame_bytes: int = limit(
        InputLimits.max_frame_bytes, "bytes of one row sent to the engine, which has a limit of the same name"
    )

    def __post_init__(self) -> None:
        parse_fields(self)

    @classmethod
    def from_parameters(cls, given: Mapping[str, str]) -> RelayLimits:
        """Return the limits among a model's parameters. Raises ValueError, which names the parameter, if one is bad."""
        values: dict[str, Any] = {spec.name: given[spec.name] for spec in fields(cls) if spec.name in given}
        return cls(**values)


DEFAULT_LIMITS = RelayLimits()
