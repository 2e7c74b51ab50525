"""Options as fields of a dataclass, which are parsed and checked when an instance is made.

`option()` declares a field: its kind, its description and its default. A kind is a function that returns the option's
value for a JSON value, or raises ValueError with what the value must be. `parse_fields()` applies the kinds, and
`server/reference.py` writes the descriptions to `docs/reference/options.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import partial
from typing import Any

from paged_backend.api.errors import ConfigError, hint
from paged_backend.api.json_values import to_integer, to_number
from paged_backend.api.secrets import redacted
from paged_backend.api.sizes import GIB, MIB, parse_quantity

Kind = Callable[[Any], Any]
SLIDING_WINDOW = "sliding_window"  # stands for all layers that have one


def option(
    kind: Kind,
    help: str,
    default: Any = MISSING,
    *,
    section: str | None = None,
    device: str | None = None,
    shown: bool = True,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        kind: parses and checks a value.
        help: description for the reference, one or more sentences.
        default: the default, which may be None; without one the option is required.
        section: heading in the reference that starts with this option.
        device: "cpu" or "cuda" for an option that only this device uses.
        shown: whether the representation of the options has the value, which may contain a password.
    """
    metadata = {"kind": kind, "help": help, "section": section, "device": device}
    return field(default=default, metadata=metadata, repr=shown)


def parse_fields(options: Any) -> None:
    """Parse the fields of a dataclass of options, in its `__post_init__`. Raises ConfigError for an invalid field."""
    for spec in fields(options):
        value = getattr(options, spec.name)
        if value is None and spec.default is None:
            continue
        try:
            parsed = spec.metadata["kind"](value)
        except ConfigError as error:  # names a field of the value
            raise ConfigError(f"{spec.name}.{error}") from None
        except ValueError as error:
            raise invalid_option(spec.name, value, str(error)) from None
        object.__setattr__(options, spec.name, parsed)


def invalid_option(name: str, value: Any, problem: str) -> ConfigError:
    """Return the error of an option. User names and passwords of URLs are not part of the message."""
    return ConfigError(f"{name}={redacted(json.dumps(value, default=str))}: {problem}")


def pattern(regex: str, problem: str) -> Kind:
    """Return the kind of a text that matches a regular expression as a whole."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str) or not re.fullmatch(regex, value, re.DOTALL):
            raise ValueError(problem)
        return value

    return parse


text = pattern(".+", "must be a non-empty string")
any_text = pattern(".*", "must be a string")
http_url = pattern(r"https?://[^/\s]+\S*", "must be a URL that begins with http:// or https://")
host = pattern(r"[A-Za-z0-9_.-]+|(?=.*:.*:)[0-9A-Fa-f:.]+", "must be a host name or an IP address, without a port")


def two_tokens(value: Any) -> Any:
    is_list = isinstance(value, list | tuple) and all(isinstance(token, str) and token for token in value)
    if not is_list or len(value) != 2 or value[0] == value[1]:
        raise ValueError('must be a list of two different tokens like ["no", "yes"]')
    return value


def layer_names(value: Any) -> Any:
    """Parse a list of numbers of layers, which may be strings, and of the name of a kind of layers."""
    names = [to_integer(name) for name in value] if isinstance(value, list | tuple) else []
    is_valid = all(name == SLIDING_WINDOW or (type(name) is int and name >= 0) for name in names)
    if not names or not is_valid:
        raise ValueError(
            f'must be a list of numbers of layers, from 0 on, or of "{SLIDING_WINDOW}", like [0, 1] or'
            f' ["{SLIDING_WINDOW}"]'
        )
    return tuple(names)


def flag(value: Any) -> bool:
    """Parse true or false; it may be a string."""
    parsed = {"true": True, "false": False}.get(str(value).lower())
    if parsed is None:
        raise ValueError("must be true or false")
    return parsed


def integer(low: int, high: int | None = None) -> Kind:
    """Return the kind of an integer from `low` to `high`, both included."""
    problem = f"must be a whole number of at least {low}" if high is None else f"must be a whole number {low}..{high}"

    def parse(value: Any) -> int:
        number = to_integer(value)
        is_integer = isinstance(number, int) and not isinstance(number, bool)
        if not is_integer or number < low or (high is not None and number > high):
            raise ValueError(problem)
        return int(number)

    return parse


def number(low: float, high: float | None = None, *, above: bool = False) -> Kind:
    """Return the kind of a finite number from `low` to `high`. With `above`, `low` itself is invalid."""
    if high is None:
        bounds = f"above {low}" if above else f"of at least {low}"
    else:
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"

    def parse(value: Any) -> float:
        number = to_number(value)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        is_high_enough = is_number and (low < number if above else low <= number)
        if not is_high_enough or number == float("inf") or (high is not None and number > high):
            raise ValueError(f"must be a number {bounds}")
        return number

    return parse


def one_of(*allowed: Any, note: str = "") -> Kind:
    """Return the kind of an option with these values, which are strings or integers. `note` ends its error."""
    values = {str(value): value for value in allowed}
    problem = "must be " + " or ".join(map(json.dumps, allowed)) + note

    def parse(value: Any) -> Any:
        if str(value) not in values:
            raise ValueError(problem)
        return values[str(value)]

    return parse


def _with_unit(kind: Kind, *, unit: int | None, convert: Callable[[Any], Any] = int) -> Kind:
    """Return the kind of an option whose value may be a text with a unit.

    Args:
        kind: kind of the option's value as a number.
        unit: bytes in one unit of the option; None for an option that is a count.
        convert: makes a number of the quotient.
    """
    example = '"8k"' if unit is None else '"500MB" or "2GiB"'

    def parse(value: Any) -> Any:
        quantity = parse_quantity(value, bytes=unit is not None) if isinstance(value, str) else None
        try:
            return kind(value if quantity is None else convert(quantity / (unit or 1)))
        except ValueError as error:
            raise ValueError(f"{error}, or with a unit like {example}") from None

    return parse


in_bytes = partial(_with_unit, unit=1)
in_mib = partial(_with_unit, unit=MIB)
in_gib = partial(_with_unit, unit=GIB, convert=float)
count = partial(_with_unit, unit=None)


def group(cls: type, example: str) -> Kind:
    """Return the kind of an option whose value is an object with fields of its own; fields that are null have their
    defaults.

    Args:
        cls: dataclass of the fields.
        example: an object, for errors.
    """

    def parse(value: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"must be an object like {example}")
        known = [spec.name for spec in fields(cls)]
        for name in value:
            if name not in known:
                raise ConfigError(f"{name}: unknown; {hint(str(name), known)}")
        return cls(**{name: given for name, given in value.items() if given is not None})

    return parse
