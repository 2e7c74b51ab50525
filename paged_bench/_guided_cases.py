"""The cases of `paged bench guided`: features of JSON Schema, regular expressions and grammars, and hard cases.

Each feature has texts that match and texts that do not.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Case(NamedTuple):
    name: str
    kind: str  # a value of Structure.kind
    text: str
    good: tuple[str, ...]
    bad: tuple[str, ...]


def _schema(name: str, schema: dict[str, Any], good: list[Any], bad: list[Any]) -> Case:
    return Case(name, "json_schema", json.dumps(schema), _written(good), _written(bad))


def _written(values: list[Any]) -> tuple[str, ...]:
    return tuple(json.dumps(value, ensure_ascii=False) for value in values)


def _of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties} | more


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
_NODE = _of({"v": _WHOLE, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, required=["v", "next"])

SCHEMAS = [
    _schema("type", {"type": "boolean"}, [True], [1, "true"]),
    _schema("several types", {"type": ["string", "null"]}, ["a", None], [1]),
    _schema("enum", {"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    _schema("const", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    _schema("minLength", {"type": "string", "minLength": 2}, ["ab"], ["a"]),
    _schema("maxLength", {"type": "string", "maxLength": 2}, ["ab", "éé"], ["abc"]),
    _schema("pattern", {"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
    _schema("pattern, not anchored", {"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
    _schema("pattern and maxLength", {"type": "string", "pattern": "^a+$", "maxLength": 3}, ["aaa"], ["aaaa", "b"]),
    _schema("format date", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "a"]),
    _schema("format uuid", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e"]),
    _schema("format email", {"type": "string", "format": "email"}, ["a@b.org"], ["a", "@"]),
    _schema("unknown format", {"type": "string", "format": "moon-phase"}, [], []),
    _schema("minimum", {"type": "integer", "minimum": 10}, [10, 123], [9, -1]),
    _schema("maximum", {"type": "integer", "maximum": 10}, [10, -50], [11]),
    _schema("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
    _schema("multipleOf", {"type": "integer", "multipleOf": 5}, [10, 0], [7]),
    _schema("items", {"type": "array", "items": _WHOLE}, [[1, 2], []], [["a"]]),
    _schema("minItems, maxItems", {"type": "array", "minItems": 1, "maxItems": 2}, [[1]], [[], [1] * 3]),
    _schema("prefixItems", {"type": "array", "prefixItems": [_WHOLE, _TEXT]}, [[1, "a"]], [["a"], [1, 2]]),
    _schema("uniqueItems", {"type": "array", "items": _WHOLE, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    _schema("contains", {"type": "array", "contains": {"const": 1}}, [[0, 1]], [[0], []]),
    _schema("required", _of({"a": _WHOLE, "b": _WHOLE}, required=["a"]), [{"a": 1}, {"a": 1, "b": 2}], [{"b": 2}]),
    _schema("additionalProperties false", _of({"a": _WHOLE}, additionalProperties=False), [{"a": 1}], [{"c": 1}]),
    _schema("additionalProperties", _of({"a": _WHOLE}, additionalProperties=_TEXT), [{"a": 1, "c": "x"}], [{"c": 1}]),
    _schema("patternProperties", {"type": "object", "patternProperties": {"^x": _WHOLE}}, [{"x1": 1}], [{"x1": "a"}]),
    _schema("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    _schema("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    _schema("maxProperties", {"type": "object", "maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}]),
    _schema("dependentRequired", _of({"a": _WHOLE}, dependentRequired={"a": ["b"]}), [{"a": 1, "b": 1}], [{"a": 1}]),
    _schema("anyOf", {"anyOf": [_WHOLE, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    _schema("oneOf, disjoint", {"oneOf": [_WHOLE, _TEXT]}, [1, "a"], [None]),
    _schema("oneOf, overlapping", {"oneOf": [{"type": "number"}, _WHOLE]}, [1.5], [1]),
    _schema("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [4], [6, 2]),
    _schema("not", {"not": _TEXT}, [1], ["a"]),
    _schema("if, then", {"if": _TEXT, "then": {"maxLength": 1}}, ["a", 5], ["ab"]),
    _schema("$ref", {"$ref": "#/$defs/t", "$defs": {"t": _WHOLE}}, [1], ["a"]),
    _schema(
        "$ref, recursive", {"$ref": "#/$defs/n", "$defs": {"n": _NODE}},
        [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "next": 2}],
    ),
]  # fmt: skip
EXPRESSIONS = [
    Case("classes and counts", "regex", r"[a-f]{2,3}-\d+", ("ab-1", "abc-22"), ("a-1", "abcd-1", "ab-")),
    Case("alternatives", "regex", r"(yes|no)( please)?", ("yes", "no please"), ("yesno", "please")),
    Case("shorthands of Unicode", "regex", r"\w+\s\S", ("né x",), ("né",)),
    Case("lazy counts", "regex", r"a*?b", ("aab", "b"), ("a",)),
    Case("letters of any case", "regex", r"(?i)ab", ("AB", "aB"), ("c",)),
    Case("anchors", "regex", r"^ab$", ("ab",), ("abc",)),
    Case("look-ahead", "regex", r"a(?=b)b", ("ab",), ("a",)),
    Case("back-references", "regex", r"([ab])\1", ("aa",), ("ab",)),
]
GRAMMARS = [
    Case("EBNF", "grammar", 'root ::= num ("+" num)*\nnum ::= [0-9]+', ("1+22",), ("1+", "+")),
    Case("EBNF, recursive", "grammar", 'root ::= "(" root ")" | "x"', ("((x))",), ("((x)",)),
    Case("EBNF, counts", "grammar", 'root ::= "a"{2,3} [^b]?', ("aa", "aaac"), ("a", "aab")),
    Case("Lark", "grammar", 'start: num ("+" num)*\nnum: /[0-9]+/', ("1+22",), ("1+",)),
]

PERSON = _of(
    {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": _of(
            {"street": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            required=["street", "zip"], additionalProperties=False,
        ),
    },
    required=["name", "age", "tags", "address"], additionalProperties=False,
)  # fmt: skip
_GIVEN = ("Ada King Lovelace, 1815-12-10",)
_ADDED = ("12 + 345 * 6 + 7890 * 11",)
_ADDRESS = {"street": "St James's Square 12", "zip": "01234"}
ONE = {"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue"], "address": _ADDRESS}
# The text that is generated while masks are timed.
SPEED = [
    Case("a schema", "json_schema", json.dumps(PERSON), (json.dumps(ONE),), ()),
    Case("any JSON", "json_schema", '{"type": "object"}', (json.dumps(ONE),), ()),
    Case("an expression", "regex", r"[A-Z][a-z]+( [A-Z][a-z]+){1,3}, [0-9]{4}-[0-9]{2}-[0-9]{2}", _GIVEN, ()),
    Case("a grammar", "grammar", 'root ::= num (op num)*\nop ::= " + " | " * "\nnum ::= [0-9]+', _ADDED, ()),
]  # fmt: skip


def _chain(count: int) -> str:
    rules = (f"r{index} ::= r{index + 1}" for index in range(count))
    return "\n".join(("root ::= r0", *rules, f'r{count} ::= "a"'))


_PAIRS = "\n".join(f"r{index} ::= r{index + 1} r{index + 1}" for index in range(40))
_PATTERNS = {"type": "string", "allOf": [{"pattern": f"a.{{{one}}}b"} for one in range(10, 30)]}
HARD = [
    Case("a multiple of 999,983", "json_schema", '{"type": "integer", "multipleOf": 999983}', (), ()),
    Case("1,000 properties", "json_schema", json.dumps(_of({f"p{one}": _TEXT for one in range(1000)})), (), ()),
    Case("5,000 values", "json_schema", json.dumps({"enum": [f"value {one}" for one in range(5000)]}), (), ()),
    Case("20 patterns at once", "json_schema", json.dumps(_PATTERNS), (), ()),
    Case("a million repetitions", "regex", "(abc){1,1000000}", (), ()),
    Case("repetitions within repetitions", "regex", "((a{1,1000}){1,1000}){1,1000}", (), ()),
    Case("exponential automaton", "regex", "(a|b)*a(a|b){200}", (), ()),
    Case("rules that double, 40 times", "grammar", f'root ::= r0\n{_PAIRS}\nr40 ::= "a"', (), ()),
    Case("4,000 rules, each in the one before", "grammar", _chain(4000), (), ()),
    Case("an ambiguous grammar", "grammar", 'root ::= x\nx ::= x x x | x x | "a"', ("a" * 60,), ()),
]  # fmt: skip
