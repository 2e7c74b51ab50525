"""Translating structures into grammars: which texts are allowed, and which structures are rejected."""

import json

import pytest
from transformers import AutoTokenizer

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.guide import GuideError
from paged_backend.guided.compiler import GrammarCompiler
from paged_client.serving.demo_model import default_directory
from tests.support.grammars import DEEP, accepts, allowed_tokens, compile_guides, create_compiler, token
from tests.support.in_process import WAIT

LETTERS = " | ".join(f'"{char}"' for char in "abcdefghijklmnopqrstuvwxyz")


AMBIGUOUS = "start: " + " | ".join(f"r{index}" for index in range(8)) + "\n"
AMBIGUOUS += "\n".join(f"r{index}: r{index} r{index} | {LETTERS}" for index in range(8))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("name", "value", "good", "bad"),
    [
        (
            "json_schema",
            SCHEMA,
            ['{"name": "Ada", "age": 36}', '{"name":"é","age":0}'],
            ['{"name": "Ada"}', "[]", "{}"],
        ),
        ("json_schema", json.dumps(SCHEMA), ['{"name": "Ada", "age": 36}'], ['{"name": "Adalbert", "age": 36}']),
        ("json_object", True, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a": }']),
        ("json_object", "true", ["{}"], ["[]"]),
        ("regex", r"[a-c]{2}|\d+", ["ab", "123"], ["abc", "a", ""]),
        ("choice", ["yes", "yes, but", 'n"o\\', "né\n"], ["yes", "yes, but", 'n"o\\', "né\n"], ["no", "yes,"]),
        ("grammar", 'root ::= num ("+" num)*\nnum ::= [0-9]+', ["1+22", "3"], ["1+", "+", "a"]),
        ("grammar", 'start: num ("+" num)*\nnum: /[0-9]+/', ["1+22", "3"], ["1+", "+"]),
        ("structured_outputs", {"regex": "a+", "json": None, "json_object": False, "choice": None}, ["aa"], ["b"]),
        ("structured_outputs", json.dumps({"json": SCHEMA}), ['{"name": "", "age": 1}'], ["{}"]),
        ("structured_outputs", {"choice": ["a", "b"]}, ["b"], ["c"]),
        ("structured_outputs", {"json_object": True}, ["{}"], ["1"]),
        ("guided_decoding", json.dumps({"regex": "a+", "backend": "outlines"}), ["aa"], ["b"]),
        ("regex", " ", [" "], ["", "a"]),
        ("choice", [" ", "\n"], [" ", "\n"], ["", "  "]),
        (
            "structured_outputs",
            {"json_object": True, "disable_any_whitespace": True},
            ['{"a":[1,{"b":2}]}'],
            ['{"a": 1}', '{ "a":1}'],
        ),
        (
            "structured_outputs",
            {"json": {"type": "array", "x-guidance": {"item_separator": ";"}}, "whitespace_pattern": " {1,2}"},
            ["[1;2]", "[1;  2]"],
            ["[1,2]", "[1;   2]", "[1;\n2]"],
        ),
        ("json_object", True, ['{"a":' + 40 * " " + "1" + 40 * "\n" + "}"], ['{"a":' + 41 * " " + "1}"]),
    ],
)
def test_exactly_the_structure_is_allowed(grammars, name, value, good, bad):
    for text in good:
        assert accepts(compile_guides(grammars, name, value), text), text
    for text in bad:
        assert not accepts(compile_guides(grammars, name, value), text), text


def test_disable_any_whitespace():
    grammars = create_compiler(any_whitespace=False)
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert accepts(compile_guides(grammars, "json_object", True), '{"a":1}')
    assert not accepts(compile_guides(grammars, "json_object", True), '{"a": 1}')
    assert accepts(compile_guides(grammars, "json_schema", schema), '{"a": 1}')
    grammars.stop()


def test_grammars_can_name_special_tokens_and_ids():
    """Uses a real tokenizer, whose first ids are special tokens."""
    directory = default_directory()
    if not directory.exists():
        pytest.skip("make demo-model has not been run")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    grammars = GrammarCompiler(tokenizer, 49_152, frozenset([2]), seconds=WAIT)
    (guide,) = compile_guides(grammars, "grammar", "start: <|im_start|> /[0-9]/ <[300-302]> <repo_name>")
    for expected, sampled in (({1}, 1), (set(tokenizer.convert_tokens_to_ids(list("0123456789"))), None)):
        assert allowed_tokens(guide) == expected
        guide.advance([sampled or min(expected)])
    assert allowed_tokens(guide) == {300, 301, 302}
    guide.advance([301])
    assert allowed_tokens(guide) == {3}
    assert 'unknown special token: "<|im_stop|>"' in str(compile_guides(grammars, "grammar", "start: <|im_stop|>"))
    assert "Token range end too large: 49152" in str(compile_guides(grammars, "grammar", "start: <[49152]>"))
    grammars.stop()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("json_schema", {"type": "array", "uniqueItems": True}, 'json_schema: Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf: supported only if"),
        ("json_schema", {"uniqueItems": True, "x-guidance": {"lenient": True}}, "Unimplemented"),
        ("json_schema", {"type": "object", "if": {}, "then": {}}, "Unimplemented"),
        ("json_schema", {"$ref": "#/$defs/nothing"}, "json_schema: "),
        ("json_schema", {"type": "strin"}, "json_schema: "),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "(a", "regex: "),
        ("regex", r"[^\x00-\U0010FFFF]", "INVALID_ARGUMENT: regex: no text can match it"),
        ("grammar", "start: A\nA: /a/ & /b/", "grammar: no text can match it"),
        ("grammar", "start: a\na: a", "grammar: no text can match it"),
        ("grammar", 'start: "a" <|nope|>', 'grammar: at 1(8): unknown special token: "<|nope|>" 1 | start'),
        ("grammar", "start: <[320]>", "Token range end too large: 320"),
        ("structured_outputs", {"json": {}, "whitespace_pattern": "["}, "structured_outputs.json: regex parse error"),
        ("grammar", 'root ::= "a" | b', "Rule 'b' not found"),
        ("grammar", "start: ((((", "grammar: "),
        ("grammar", "start: x\nx[temperature=0.5]: /a+/", "cannot set `temperature`"),
        ("structured_outputs", {"regex": "(a"}, "structured_outputs.regex: "),
        ("grammar", DEEP, "grammar: it is too deep or too large to be compiled"),
        ("grammar", AMBIGUOUS, "Too many items (limit 5000; mask)"),  # llguidance's default limit is ten times that
    ],
)
def test_invalid_structure_is_rejected_with_the_reason(grammars, name, value, message):
    error = compile_guides(grammars, name, value)
    assert isinstance(error, RequestError)
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert message in str(error)
    assert len(str(error)) < 500


def test_mask_that_exceeds_its_limits_fails_the_guide(grammars):
    """llguidance's default limits would allow these 72 characters."""
    (guide,) = compile_guides(grammars, "regex", "(([ab]{1,30}a){1,30}b){1,30}c")

    def advance(text):
        for char in text:
            assert allowed_tokens(guide)
            guide.advance([token(char)])

    with pytest.raises(GuideError, match="regex: cannot continue: lexer error: too many expressions constructed"):
        advance("ab" * 36)
