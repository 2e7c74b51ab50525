"""The server's checks of single sampling parameters, for values that a user types."""

from __future__ import annotations

from dataclasses import fields

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import RequestError
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.sampling_params import SamplingParams

_MOST = 2**31 - 1
# The highest limits, because the server's limits are not known.
_OWN = {spec.name: _MOST for spec in fields(InputLimits) if spec.name not in ("min_priority", "max_prompt_chars")}
_LIMITS = EngineLimits(_MOST, _MOST, _MOST, BlockLayout(1), _MOST, input_limits=InputLimits(**_OWN))
_PARSERS = {spec.name: spec.metadata["parse"] for spec in fields(SamplingParams)}
NAMES = tuple(_PARSERS)


def problem_of(name: str, value: object) -> str | None:
    """Return what is wrong with the value of a known parameter, or None. Null selects the default."""
    try:
        if value is not None:
            _PARSERS[name](name, value, _LIMITS)
    except RequestError as error:
        return str(error).partition(": ")[2]
    return None
