"""Structured outputs: read the parameters that request a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_backend.api import json_values
from paged_backend.api.limits import InputLimits


class Structure(NamedTuple):
    """The structure that an output must have. `kind` and `text` determine it; equal structures share a grammar."""

    kind: str  # "json_schema", "regex", "choice" or "grammar"
    text: str  # a schema or a list of choices as JSON; a regular expression or grammar verbatim
    field: str  # the request field that contained it, for error messages

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.text


def _json_schema(field: str, value: Any, input_limits: InputLimits) -> Structure:
    schema = _parsed(value)
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema: an object, or a string that holds one")
    return Structure("json_schema", _as_json(schema), field)


def _json_object(field: str, value: Any, input_limits: InputLimits) -> Structure | None:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return Structure("json_schema", '{"type": "object"}', field) if value else None


def _choice(field: str, value: Any, input_limits: InputLimits) -> Structure:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise ValueError("must be a list of strings, none of them empty")
    if not 1 <= len(value) <= input_limits.max_choices:
        raise ValueError(f"must be 1..{input_limits.max_choices} strings (max_choices)")
    return Structure("choice", _as_json(list(value)), field)


def _regex(field: str, value: Any, input_limits: InputLimits) -> Structure:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string that is not empty")
    return Structure("regex", value, field)


def _grammar(field: str, value: Any, input_limits: InputLimits) -> Structure:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not blank")
    return Structure("grammar", value, field)


def _structured_outputs(field: str, value: Any, input_limits: InputLimits) -> Structure | None:
    """Read vLLM's structured_outputs: an object in which exactly one field has a value."""
    fields = _parsed(value)
    if not isinstance(fields, Mapping):
        raise ValueError("must be an object, or a string that holds one, with one of " + ", ".join(_FIELDS))
    given = {name: item for name, item in fields.items() if item is not None and item is not False}
    whitespace = {name: given.pop(name) for name in _WHITESPACE if name in given}
    for name in given.keys() - _FIELDS.keys():
        raise ValueError(f"{name} is not supported; leave it out")
    if len(given) > 1:
        raise ValueError(f"has {' and '.join(sorted(given))}; give one of them")
    if whitespace and not given:
        raise ValueError(f"{' and '.join(whitespace)}: has no effect without json or json_object")
    for name, item in given.items():
        try:
            structure = _FIELDS[name](f"{field}.{name}", item, input_limits)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return _set_whitespace(structure, whitespace)
    return None


def _set_whitespace(structure: Structure | None, whitespace: Mapping[str, Any]) -> Structure | None:
    """Set the white space between JSON tokens, which llguidance reads from the schema's `x-guidance` field."""
    if not whitespace or structure is None:
        return structure
    if structure.kind != "json_schema" or len(whitespace) > 1:
        raise ValueError(f"{' and '.join(whitespace)}: give one of them, together with json or json_object")
    ((name, value),) = whitespace.items()
    if not isinstance(value, bool if name == "disable_any_whitespace" else str):
        raise ValueError(f"{name}={json.dumps(value, default=str)}: must be {_WHITESPACE[name]}")
    pattern = value if name == "whitespace_pattern" else None
    schema = json.loads(structure.text)
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError("x-guidance: must be an object")
    schema["x-guidance"] = own | {"whitespace_flexible": pattern is not None, "whitespace_pattern": pattern}
    return structure._replace(text=_as_json(schema))


def _guided_decoding(field: str, value: Any, input_limits: InputLimits) -> Structure | None:
    """Read `guided_decoding`, the former name of vLLM's structured_outputs. Its `backend` field is ignored."""
    fields = _parsed(value)
    if isinstance(fields, Mapping):
        fields = {name: item for name, item in fields.items() if name != "backend"}
    return _structured_outputs(field, fields, input_limits)


STRUCTURE_PARAMETERS: dict[str, Callable[[str, Any, InputLimits], Structure | None]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "guided_decoding": _guided_decoding,
}
_WHITESPACE = {"disable_any_whitespace": "true or false", "whitespace_pattern": "a string, a regular expression"}
_FIELDS = {"json": _json_schema} | {
    name: STRUCTURE_PARAMETERS[name] for name in ("regex", "choice", "grammar", "json_object")
}


def read_structure(name: str, value: Any, input_limits: InputLimits = InputLimits()) -> Structure | None:
    """Read the value of the parameter `name`. Returns None if it requests no structure.

    Raises ValueError with what the value must be.
    """
    if value is None:
        return None
    structure = STRUCTURE_PARAMETERS[name](name, value, input_limits)
    if structure:
        nbytes = len(structure.text.encode(errors="surrogatepass"))
        if nbytes > input_limits.max_structure_bytes:
            raise ValueError(
                f"has {nbytes} bytes; must be at most {input_limits.max_structure_bytes} (max_structure_bytes)"
            )
        if structure.text != structure.text.encode(errors="ignore").decode():
            raise ValueError("contains an unpaired surrogate; send UTF-8 text")
    return structure


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json_values.parse(value)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
