"""Limits of the models in front of the engine: parameters of their config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paged_backend.api.limits import InputLimits, limit
from paged_backend.api.options import parse_string


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """The limits of one model. The engine checks its own limits in addition."""

    max_open_rows: int = limit(1024, "open rows of all requests; a request with more is rejected as `UNAVAILABLE`")
    max_biases: int = limit(1024, "words in `embedding_bias_words`, or tokens in `embedding_bias`, per row")
    max_frame_bytes: int = limit(
        InputLimits.max_frame_bytes, "bytes of one row sent to the engine, which has a limit of the same name"
    )

    @classmethod
    def from_parameters(cls, given: Mapping[str, str]) -> RelayLimits:
        """Return the limits among a model's parameters. Raises ValueError, which names the parameter, if one is bad."""
        values = {}
        for spec in fields(cls):
            if spec.name in given:
                values[spec.name] = parse_string(given[spec.name])
                if problem := spec.metadata["check"](values[spec.name]):
                    raise ValueError(f"{spec.name}={given[spec.name]!r}: {problem}")
        return cls(**values)


DEFAULT_LIMITS = RelayLimits()
