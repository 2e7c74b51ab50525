"""Read engine options from JSON: names of this engine and of vLLM, and the spellings of the nested option `limits`.

A limit has three spellings: `{"limits": {"max_tools": 8}}`, `{"limits.max_tools": 8}` (for a command line) and the
alias `{"max_tools": 8}`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

from paged_backend.api import vllm_options
from paged_backend.api.errors import ConfigError, closest_match
from paged_backend.api.kv_events import KvEventsConfig
from paged_backend.api.limits import InputLimits
from paged_backend.api.options import invalid_option, parse_string
from paged_backend.api.sizes import Quantity

log = logging.getLogger("paged_llm")

_LIMITS = {spec.name: spec for spec in fields(InputLimits)}
_KV_EVENTS = {spec.name: spec for spec in fields(KvEventsConfig)}
LIMIT_NAMES = tuple(_LIMITS)
_PREFIX = "limits."


def parse_options(options: Mapping[str, Any], specs: Iterable[Field[Any]]) -> dict[str, Any]:
    """Return values by option name. Options that are null are omitted and so get their default.

    Options of vLLM that this engine does not have are accepted if their value changes nothing here. Raises ConfigError
    for an option that is unknown, and for a vLLM option that requests something this engine does not do.

    Args:
        options: JSON values by name.
        specs: the fields of EngineConfig.
    """
    known = {spec.name: spec for spec in specs}
    values: dict[str, Any] = {}
    ignored = []
    for name, value in nest_limits(vllm_options.translate(options)).items():
        if name == "limits":
            values[name] = InputLimits(**_parse_group("limits", "limit", _LIMITS, value))
        elif name == "kv_events_config":
            values[name] = _parse_kv_events(value)
        elif name in known:
            values[name] = _parse_value(known[name], value)
        elif name not in vllm_options.UNSUPPORTED:
            raise ConfigError(f"{name}: unknown engine option; {_suggest(str(name), known)}")
        elif problem := vllm_options.check(name, value):
            raise invalid_option(name, value, problem)
        else:
            ignored.append(name)
    if ignored:
        log.info("ignoring vLLM options that change nothing here: %s", ", ".join(ignored))
    return {name: value for name, value in values.items() if value is not None}


def _parse_value(spec: Field[Any], value: Any) -> Any:
    """Return the value with strings converted to the type of the option. An invalid value may stay as it is."""
    if isinstance(check := spec.metadata["check"], Quantity):
        return check.parse(value)
    return value if str(spec.type).startswith("str") else parse_string(value)


def merge_options(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `overrides`. Limits are merged one by one, in any spelling."""
    below, above = nest_limits(base), nest_limits(overrides)
    limits = {**below.get("limits", {}), **above.get("limits", {})}
    return {**below, **above, **({"limits": limits} if limits else {})}


def nest_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Collect all spellings of limits in one entry `limits`.

    Raises ConfigError if `limits` is not an object, or if two spellings set the same limit.
    """
    others: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for option, value in options.items():
        if not _is_limit(option):
            others[option] = value
            continue
        for name, spelling, one in _limits_of(option, value):
            if name in limits:
                raise ConfigError(f"{spellings[name]} and {spelling}: both set the same limit; give one of them")
            limits[name], spellings[name] = one, spelling
    return others | ({"limits": limits} if limits else {})


def _is_limit(option: str) -> bool:
    return option == "limits" or option in LIMIT_NAMES or option.startswith(_PREFIX)


def _limits_of(option: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, spelling and value of each limit that an option sets."""
    if option != "limits":
        yield option.removeprefix(_PREFIX), option, value
    elif isinstance(value, Mapping):
        yield from ((name, _PREFIX + name, one) for name, one in value.items())
    elif value is not None:
        raise invalid_option(option, value, 'must be an object like {"max_tools": 8}')


def _parse_group(option: str, what: str, specs: Mapping[str, Field[Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an option that has fields of its own. Raises ConfigError for an unknown one.

    what: the name of such a field in errors.
    """
    for name in values:
        if name not in specs:
            near = closest_match(name, specs)
            hint = f"did you mean {option}.{near}?" if near else f"known {what}s are {', '.join(specs)}"
            raise ConfigError(f"{option}.{name}: unknown {what}; {hint}")
    return {name: _parse_value(specs[name], value) for name, value in values.items() if value is not None}


def _parse_kv_events(values: Any) -> KvEventsConfig | None:
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise invalid_option("kv_events_config", values, 'must be an object like {"enable_kv_cache_events": true}')
    return KvEventsConfig(**_parse_group("kv_events_config", "field", _KV_EVENTS, values))


def _suggest(name: str, options: Iterable[str]) -> str:
    known = [*options, *LIMIT_NAMES]
    near = closest_match(name, [*known, *vllm_options.UNSUPPORTED])
    return f"did you mean {near}?" if near else f"known options are {', '.join(known)}"
