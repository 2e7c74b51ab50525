"""The caps of the models of tensorrtllm_backend: parameters of their config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paged_backend.api.limits import InputLimits, limit
from paged_backend.api.options import parse_string


@dataclass(frozen=True, kw_only=True)
class RelayCaps:
    """Of one model. What a row asks of the engine is held to the engine's own as well."""

    max_open_rows: int = limit(1024, "rows of requests that may be open; what would be more is refused, `UNAVAILABLE`")
    max_biases: int = limit(1024, "words in `embedding_bias_words`, or tokens in `embedding_bias`, of one row")
    max_frame_bytes: int = limit(
        InputLimits.max_frame_bytes, "bytes of one row on its way to the engine, which has an option of this name"
    )

    @classmethod
    def from_parameters(cls, given: Mapping[str, str]) -> RelayCaps:
        """given: parameters by name, of which those of other names are left alone. Raises ValueError that names one
        with a bad value."""
        values = {}
        for spec in fields(cls):
            if spec.name in given:
                values[spec.name] = parse_string(given[spec.name])
                if problem := spec.metadata["check"](values[spec.name]):
                    raise ValueError(f"{spec.name}={given[spec.name]!r}: {problem}")
        return cls(**values)


DEFAULT_CAPS = RelayCaps()
