"""Options as dataclass fields.

`option()` declares a field together with its check and its description. `validate()` runs the checks, and
`server/reference.py` writes the descriptions to `docs/reference/options.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any

from paged_backend.api.errors import ConfigError
from paged_backend.api.secrets import redacted

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
KV_CACHE_DTYPES = {"auto": "auto", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}
Check = Callable[[Any], str | None]  # returns None for a valid value, else what it must be


def option(
    check: Check,
    help: str,
    default: Any = MISSING,
    *,
    optional: bool = False,
    section: str | None = None,
    device: str | None = None,
    shown: bool = True,
) -> Any:
    """Declare an option as a dataclass field.

    Args:
        check: validates a given value.
        help: description for the reference, one or more sentences.
        default: the default; without one the option is required.
        optional: whether None is a valid value.
        section: heading in the reference that starts with this option.
        device: "cpu" or "cuda" for an option that only this device uses.
        shown: whether the representation of the options has the value, which may contain a password.
    """
    metadata = {"check": check, "help": help, "optional": optional, "section": section, "device": device}
    return field(default=default, metadata=metadata, repr=shown)


def validate(options: Any, prefix: str = "") -> None:
    """Check every field of a dataclass of options. Raises ConfigError for the first invalid one."""
    for spec in fields(options):
        value = getattr(options, spec.name)
        if value is None and spec.metadata["optional"]:
            continue
        if problem := spec.metadata["check"](value):
            raise invalid_option(prefix + spec.name, value, problem)


def invalid_option(name: str, value: Any, problem: str) -> ConfigError:
    """Return the error of an option. User names and passwords of URLs are not part of the message."""
    return ConfigError(f"{name}={redacted(json.dumps(value, default=str))}: {problem}")


def parse_string(value: Any) -> Any:
    """Return the boolean or number that a string spells, or else the value itself.

    Triton's model directories often write "true", "2" or "0.5".
    """
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return json.loads(value) if value[:1].isdecimal() else value
    except ValueError:
        return value


def text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "must be a non-empty string"


def two_tokens(value: Any) -> str | None:
    is_pair = isinstance(value, list | tuple) and len(value) == 2 and all(text(one) is None for one in value)
    return None if is_pair and value[0] != value[1] else 'must be a list of two different tokens like ["no", "yes"]'


def http_url(value: Any) -> str | None:
    is_url = isinstance(value, str) and re.fullmatch(r"https?://[^/\s]+\S*", value)
    return None if is_url else "must be a URL that begins with http:// or https://"


def host(value: Any) -> str | None:
    """Check for a host name or an IP address, without a port."""
    is_name = isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+:[0-9A-Fa-f:.]*", value)
    is_host = is_name and (":" not in value or value.count(":") > 1)
    return None if is_host else "must be a host name or an IP address, without a port"


def flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def integer(low: int, high: int | None = None) -> Check:
    """Return a check for an integer from `low` to `high`, both included."""
    problem = f"must be a whole number of at least {low}" if high is None else f"must be a whole number {low}..{high}"

    def check(value: Any) -> str | None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return None if is_integer and value >= low and (high is None or value <= high) else problem

    return check


def fraction(value: Any) -> str | None:
    return None if _is_number(value) and 0 < value <= 1 else "must be a number above 0 and at most 1"


def ratio(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value <= 1 else "must be a number from 0 to 1"


def at_least_zero(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value < float("inf") else "must be a number of at least 0"


def above_zero(value: Any) -> str | None:
    return None if at_least_zero(value) is None and value > 0 else "must be a number above 0"


def one_of(*allowed: Any) -> Check:
    """Return a check for one of these values, of the same type: True is not 1."""
    problem = "must be " + " or ".join(json.dumps(value) for value in allowed)
    return lambda value: None if any(value == one and type(value) is type(one) for one in allowed) else problem


def quantization(value: Any) -> str | None:
    """Check the format to which weights are converted. vLLM's users name the format of the model's files here."""
    if value in ("int8", "int4"):
        return None
    return (
        'must be "int8" or "int4"; a model whose weights are quantized needs no option, because config.json names their'
        " format"
    )


def instance_of(kind: type) -> Check:
    return lambda value: None if isinstance(value, kind) else f"must be {kind.__name__}"


def power_of_two(highest: int) -> Check:
    sizes = [1 << shift for shift in range(highest.bit_length())]
    return lambda value: None if type(value) is int and value in sizes else f"must be one of {sizes}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
