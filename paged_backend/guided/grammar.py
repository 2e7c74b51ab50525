"""From what a client asks of an output's looks to llguidance's grammars, and what bounds them.

Imported by the process that tries them first, too: it needs neither tensors nor a model.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import llguidance

# White space between two tokens of JSON ends: a model that likes it would fill its max_tokens with it.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Of a step's mask, so that none takes long: what the library allows by itself took up to 0.7 s.
STEP_ITEMS, STEP_FUEL = 5_000, 100_000
LEXER_STATES = 50_000  # of one output, a kilobyte or two each
SHOWN = 300  # characters of the library's reasons
_TEMPERATURE = re.compile(r"\[[^\]\n]*\btemperature\s*=")
_LISTED = re.compile(r"; following special tokens are available: \S*")  # some of them, and not by their names
_PLAIN = {
    "NoExtensionBias": "no text can match it",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf: served only where its schemas clearly exclude each other; anyOf allows what several of them fit"
    ),
}


class GrammarSettings(NamedTuple):
    """What grammars may name, and what holds for all of them."""

    vocab_size: int
    special_tokens: tuple[str, ...]  # as the tokenizer spells them
    any_whitespace: bool  # between the tokens of JSON, where a schema says nothing of it


def limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False
    )


def build_grammar(kind: str, text: str, *, any_whitespace: bool = True) -> str:
    """The library's grammar of a `Structure`; most of what may be wrong with it shows when it is compiled. Raises
    ValueError."""
    if kind == "json_schema":
        # What the library cannot do is an error, whatever the schema itself says.
        defaults = {"whitespace_pattern": WHITE_SPACE} if any_whitespace else {"whitespace_flexible": False}
        overrides = {"lenient": False, "coerce_one_of": False}
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults, overrides=overrides)
    if kind == "choice":
        return llguidance.LLMatcher.grammar_from_regex("|".join(f"(?:{_escaped(one)})" for one in json.loads(text)))
    if kind == "grammar":
        if _TEMPERATURE.search(text):
            raise ValueError("a grammar cannot set `temperature`; leave it to the sampling parameter")
        return llguidance.grammar_from("ebnf", text)
    return llguidance.LLMatcher.grammar_from_regex(text)


def _escaped(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher whose first mask is known. Raises ValueError with the library's reason."""
    made = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not made.is_error():
        made.compute_bitmask()
    if made.is_error():
        raise ValueError(reason(made))
    return made


def reason(matcher: Any) -> str:
    text = " ".join(_LISTED.sub("", matcher.get_error().replace("<non-verbose/>", "")).split())
    text = _PLAIN.get(text, text)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
