"""Keys of `generation_config.json` that set defaults of sampling parameters, and their checks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paged_backend.api import parameter_parsers as parsers
from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import RequestError, closest_match
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits, SamplingDefaults
from paged_backend.api.sampling_params import SamplingParams

AUTO, BUILT_IN = "auto", "vllm"  # values of the option `generation_config` that are not directories
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")  # without effect in transformers if `do_sample` is false
MAX_TOKENS = "max_new_tokens"
KEYS = (*SAMPLING_KEYS, "repetition_penalty", MAX_TOKENS)

_FIELDS = {spec.name: spec for spec in fields(SamplingParams)}
_ANY = EngineLimits(UNBOUNDED_MAX_TOKENS, 1, 1, BlockLayout(1), 1)  # the parsers of these keys use no limits
_parse_max_tokens = parsers.integer(1, UNBOUNDED_MAX_TOKENS)


def parse_default(key: str, value: Any) -> tuple[Any, str | None]:
    """Return the parsed value of one of KEYS and None, or None and what the value must be."""
    parse = _parse_max_tokens if key == MAX_TOKENS else _FIELDS[key].metadata["parse"]
    try:
        return parse(key, value, _ANY), None
    except RequestError as error:
        return None, str(error).rpartition(": ")[2]


def overrides(value: Any) -> str | None:
    """Check the option `override_generation_config`."""
    if not isinstance(value, Mapping):
        return 'must be an object like {"temperature": 0.5}'
    for key, one in value.items():
        if key not in KEYS:
            near = closest_match(str(key), KEYS)
            return f"{key}: unknown; " + (f"did you mean {near}?" if near else f"known are {', '.join(KEYS)}")
        if one is not None and (problem := parse_default(key, one)[1]):
            return f"{key}={json.dumps(one, default=str)}: {problem}"
    return None


def to_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults for checked values by key. Null, and the engine's own default, change nothing."""
    parsed = {key: parse_default(key, value)[0] for key, value in values.items() if value is not None}
    max_tokens = parsed.pop(MAX_TOKENS, None)
    changed = {name: value for name, value in parsed.items() if value != _FIELDS[name].default}
    if max_tokens is not None:
        changed["max_tokens"] = UNBOUNDED_MAX_TOKENS
    return SamplingDefaults(changed, max_tokens)
