"""Translate structures into llguidance grammars, and create matchers with bounded time and memory.

The sandbox process imports this module as well, so it depends on neither tensors nor a model.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import llguidance

# White space between two JSON tokens is bounded: otherwise some models generate it up to max_tokens.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Limits for the mask of one step. With the library's defaults a mask took up to 0.7 s.
STEP_ITEMS, STEP_FUEL = 5_000, 100_000
LEXER_STATES = 50_000  # maximum states that the outputs of a compiled grammar share, of 0.3 to 2 KB each
MAX_REASON_CHARS = 300  # maximum length of an error message of the library
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")
_LISTED = re.compile(r"; following special tokens are available: \S*")  # the list is incomplete and does not give names
_READABLE = {
    "NoExtensionBias": "no text can match it",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf: supported only if its schemas are mutually exclusive; use anyOf, which also accepts several matches"
    ),
}


class GrammarSettings(NamedTuple):
    """Settings shared by all grammars of one tokenizer."""

    vocab_size: int
    special_tokens: tuple[str, ...]  # texts of the special tokens
    any_whitespace: bool  # whether JSON may contain white space between its tokens if the schema does not say


def parser_limits() -> llguidance.LLParserLimits:
    """Return the limits of one matcher."""
    return llguidance.LLParserLimits(
        step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False
    )


def build_grammar(kind: str, text: str, *, any_whitespace: bool = True) -> str:
    """Return the llguidance grammar of a structure.

    Raises ValueError, but most errors only appear when `create_matcher` compiles the grammar.
    """
    if kind == "json_schema":
        # An unsupported keyword is an error even if the schema itself sets `lenient`.
        defaults: Any = {"whitespace_flexible": False}
        if any_whitespace:
            defaults = {"whitespace_pattern": WHITESPACE}
        overrides: Any = {"lenient": False, "coerce_one_of": False}
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults, overrides=overrides)
    if kind == "choice":
        alternatives = "|".join(f"(?:{_escape(choice)})" for choice in json.loads(text))
        return llguidance.LLMatcher.grammar_from_regex(alternatives)
    if kind == "grammar":
        if _TEMPERATURE.search(text):
            raise ValueError("a grammar cannot set `temperature`; leave it to the sampling parameter")
        return llguidance.grammar_from("ebnf", text)
    return llguidance.LLMatcher.grammar_from_regex(text)


def _escape(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def create_matcher(tokenizer: Any, grammar: str) -> Any:
    """Create a matcher and compute its first mask. Raises ValueError with llguidance's reason."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(error_reason(matcher))
    return matcher


def error_reason(matcher: Any) -> str:
    """Return the error of a matcher as one line of bounded length."""
    text = " ".join(_LISTED.sub("", matcher.get_error().replace("<non-verbose/>", "")).split())
    text = _READABLE.get(text, text)
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."
