"""What an output may be asked to look like: JSON of a schema, a regular expression, one of some texts, a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paged_backend.api.limits import InputLimits


class Structure(NamedTuple):
    """By its kind and text alone it is known which texts it stands for."""

    kind: str  # "json_schema", "regex", "choice" or "grammar"
    text: str  # JSON of the schema, or of the list of choices; the others as they are
    field: str  # where it came from, for errors

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
    """As vLLM's clients send it: an object, of whose names one has a value."""
    asked = _parsed(value)
    if not isinstance(asked, Mapping):
        raise ValueError("must be an object, or a string that holds one, with one of " + ", ".join(_WITHIN))
    given = {name: one for name, one in asked.items() if one is not None and one is not False}
    whitespace = {name: given.pop(name) for name in _WHITE_SPACE if name in given}
    for name in given.keys() - _WITHIN.keys():
        raise ValueError(f"{name} is not supported; leave it out")
    if len(given) > 1:
        raise ValueError(f"has {' and '.join(sorted(given))}; give one of them")
    if whitespace and not given:
        raise ValueError(f"{' and '.join(whitespace)}: means nothing without json or json_object")
    for name, one in given.items():
        try:
            structure = _WITHIN[name](f"{field}.{name}", one, input_limits)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return _spaced(structure, whitespace)
    return None


def _spaced(structure: Structure | None, whitespace: Mapping[str, Any]) -> Structure | None:
    """With what is asked of the white space between the tokens of JSON, as the library wants it: in the schema."""
    if not whitespace or structure is None:
        return structure
    if structure.kind != "json_schema" or len(whitespace) > 1:
        raise ValueError(f"{' and '.join(whitespace)}: one of them may stand beside json or json_object, and no other")
    ((name, value),) = whitespace.items()
    if not isinstance(value, bool if name == "disable_any_whitespace" else str):
        raise ValueError(f"{name}={json.dumps(value, default=str)}: must be {_WHITE_SPACE[name]}")
    pattern = value if name == "whitespace_pattern" else None
    schema = json.loads(structure.text)
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError("x-guidance: must be an object")
    schema["x-guidance"] = own | {"whitespace_flexible": pattern is not None, "whitespace_pattern": pattern}
    return structure._replace(text=_as_json(schema))


def _guided_decoding(field: str, value: Any, input_limits: InputLimits) -> Structure | None:
    """What structured_outputs was called before, with the library in it, which any text of a form is the same to."""
    asked = _parsed(value)
    if isinstance(asked, Mapping):
        asked = {name: one for name, one in asked.items() if name != "backend"}
    return _structured_outputs(field, asked, input_limits)


READERS: dict[str, Callable[[str, Any, InputLimits], Structure | None]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structured_outputs": _structured_outputs,
    "guided_decoding": _guided_decoding,
}
_WHITE_SPACE = {"disable_any_whitespace": "true or false", "whitespace_pattern": "a string, a regular expression"}
_WITHIN = {"json": _json_schema} | {name: READERS[name] for name in ("regex", "choice", "grammar", "json_object")}


def read_structure(name: str, value: Any, input_limits: InputLimits = InputLimits()) -> Structure | None:
    """The value of the parameter `name`; None asks for nothing. Raises ValueError, which says what it must be."""
    if value is None:
        return None
    structure = READERS[name](name, value, input_limits)
    if structure:
        nbytes = len(structure.text.encode(errors="surrogatepass"))
        if nbytes > input_limits.max_structure_bytes:
            raise ValueError(
                f"has {nbytes} bytes; must be at most {input_limits.max_structure_bytes} (max_structure_bytes)"
            )
        if structure.text != structure.text.encode(errors="ignore").decode():
            raise ValueError("holds half a character; send UTF-8 text")
    return structure


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from None
