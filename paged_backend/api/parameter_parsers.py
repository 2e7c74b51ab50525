"""Parsers of sampling parameters: each turns a JSON value into the type of one field of SamplingParams.

A parser takes the name of the parameter, its value and the limits, and raises RequestError for an invalid value. None
selects the default without calling the parser, except for `max_tokens`. Numbers and flags may be strings, because
Triton's request parameters often are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from paged_backend.api.errors import RequestError, invalid_argument, is_utf8_text
from paged_backend.api.json_values import to_flag, to_integer, to_number
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits
from paged_backend.api.structures import Structure, read_structure

Parser = Callable[[str, Any, EngineLimits], Any]


def parameter(parser: Parser, default: Any, help: str, *, section: str | None = None, with_beams: bool = True) -> Any:
    """Declare a sampling parameter as a dataclass field.

    Args:
        parser: validates and converts a value.
        default: the default, already converted.
        help: description for the reference, one or more sentences.
        section: heading in the reference that starts with this parameter.
        with_beams: whether the parameter has an effect in a beam search.
    """
    return field(
        default=default, metadata={"parse": parser, "help": help, "section": section, "with_beams": with_beams}
    )


def between(low: float, high: float, *, above: bool = False) -> Parser:
    """Return a parser for a number from `low` to `high`. With `above`, `low` itself is invalid."""
    problem = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"

    def parse(name: str, value: Any, limits: EngineLimits) -> float:
        number = _number(name, value)
        if not low <= number <= high or (above and number == low):
            raise invalid_argument(name, value, problem)
        return number

    return parse


def integer(low: int, high: int) -> Parser:
    """Return a parser for an integer from `low` to `high`."""
    return lambda name, value, limits: _integer(name, value, low, high)


def tokens(low: int) -> Parser:
    """Return a parser for a number of tokens from `low` to the context length."""
    return lambda name, value, limits: _integer(name, value, low, limits.max_model_len)


def kept_tokens(name: str, value: Any, limits: EngineLimits) -> int:
    """Parse a number of prompt tokens to keep. As in vLLM, -1 is the context length."""
    if value in (-1, "-1"):
        return limits.max_model_len
    return _integer(name, value, 1, limits.max_model_len, ", or -1 for the context length")


def token_budget(name: str, value: Any, limits: EngineLimits) -> int | None:
    """Parse a number of tokens. As in vLLM, -1 is no limit."""
    return None if value in (-1, "-1") else _integer(name, value, 0, 2**31 - 1, ", or -1 for no limit")


def flag(name: str, value: Any, limits: EngineLimits) -> bool:
    """Parse true, false, 1, 0, or one of them as a string."""
    parsed = to_flag(value)
    if not isinstance(parsed, bool):
        raise invalid_argument(name, value, "must be true or false")
    return parsed


def max_tokens(name: str, value: Any, limits: EngineLimits) -> int:
    """Parse `max_tokens`. None means as many tokens as fit. SamplingParams.parse decides whether 0 is allowed."""
    if value is None:
        return UNBOUNDED_MAX_TOKENS
    is_zero = value in (0, "0") and not isinstance(value, bool)
    return 0 if is_zero else _integer(name, value, 1, limits.max_model_len)


def top_k(name: str, value: Any, limits: EngineLimits) -> int:
    """Parse `top_k`. As in vLLM, 0 and -1 both disable it."""
    return max(0, _integer(name, value, -1, 2**31 - 1))


def samples(name: str, value: Any, limits: EngineLimits) -> int:
    return _integer(name, value, 1, limits.max_num_seqs)


def logprobs(name: str, value: Any, limits: EngineLimits) -> int:
    return _integer(name, value, 0, limits.input_limits.max_logprobs, " (max_logprobs)")


def priority(name: str, value: Any, limits: EngineLimits) -> int:
    return _integer(name, value, limits.input_limits.min_priority, 2**31 - 1, " (min_priority)")


def early_stopping(name: str, value: Any, limits: EngineLimits) -> bool | str:
    if value == "never":
        return "never"
    try:
        return flag(name, value, limits)
    except RequestError:
        raise invalid_argument(name, value, 'must be true, false or "never"') from None


def string(max_bytes: str, *, empty: bool) -> Parser:
    """Return a parser for one string. `max_bytes` names its limit, `empty` allows the empty string."""

    def parse(name: str, value: Any, limits: EngineLimits) -> str:
        if not is_utf8_text(value) or not (value or empty):
            suffix = "" if empty else ", not empty"
            raise invalid_argument(name, value, f"must be a string of whole characters{suffix}")
        limits.input_limits.check(max_bytes, name, len(value.encode()), "bytes")
        return str(value)

    return parse


def strings(max_count: str, max_bytes: str) -> Parser:
    """Return a parser for a list of strings, or for one string.

    `max_count` and `max_bytes` name the limits of their number and of the bytes of each.
    """

    def parse(name: str, value: Any, limits: EngineLimits) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple) or not all(is_utf8_text(text) and text for text in values):
            raise invalid_argument(name, value, "must be a non-empty string of whole characters, or a list of them")
        limits.input_limits.check(max_count, name, len(values), "strings")
        for text in values:
            limits.input_limits.check(max_bytes, name, len(text.encode()), "bytes")
        return tuple(values)

    return parse


def stop_token_ids(name: str, value: Any, limits: EngineLimits) -> frozenset[int]:
    return _token_ids(name, value, "max_stop_token_ids", limits)


def allowed_token_ids(name: str, value: Any, limits: EngineLimits) -> frozenset[int]:
    ids = _token_ids(name, value, "max_allowed_token_ids", limits)
    if not ids:
        raise invalid_argument(name, value, "must have at least one id")
    return ids


def token_words(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[int, ...], ...]:
    """Parse a list of words, each a list of token ids."""
    if not isinstance(value, list | tuple) or not all(isinstance(word, list | tuple) for word in value):
        raise invalid_argument(name, value, "must be a list of lists of token ids")
    limits.input_limits.check("max_token_words", name, len(value), "words")
    most = limits.input_limits.max_token_word_ids
    for word in value:
        if not 1 <= len(word) <= most:
            raise invalid_argument(name, f"{len(word)} ids", f"must be 1..{most} ids a word (max_token_word_ids)")
    return tuple(tuple(_integer(name, token, 0, limits.vocab_size - 1) for token in word) for word in value)


def logit_bias(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[int, float], ...]:
    """Parse an object from token ids (strings, if it was JSON) to biases into pairs, sorted by token id."""
    if not isinstance(value, Mapping):
        raise invalid_argument(name, value, 'must be an object like {"42": -100}, from token ids to numbers')
    limits.input_limits.check("max_logit_biases", name, len(value), "tokens")
    parsed: dict[int, float] = {}
    for key, bias in value.items():
        token = _integer(name, key, 0, limits.vocab_size - 1)
        if token in parsed:
            raise invalid_argument(name, key, f"token {token} is there twice")
        parsed[token] = _bias(f"{name}[{token}]", bias, limits)
    return tuple(sorted(parsed.items()))


def word_bias(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[str, float], ...]:
    """Parse an object from words to the bias of each of their tokens into pairs."""
    if not isinstance(value, Mapping):
        raise invalid_argument(name, value, 'must be an object like {"sea": 2.5}, from words to numbers')
    words = strings("max_biased_words", "max_word_bytes")(name, list(value), limits)
    return tuple((word, _bias(f"{name}[{json.dumps(word)}]", value[word], limits)) for word in words)


def structure(name: str, value: Any, limits: EngineLimits) -> Structure | None:
    try:
        return read_structure(name, value, limits.input_limits)
    except ValueError as error:
        raise invalid_argument(name, value, str(error)) from None


_bias = between(-100, 100)


def _token_ids(name: str, value: Any, max_count: str, limits: EngineLimits) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise invalid_argument(name, value, "must be a list of token ids")
    limits.input_limits.check(max_count, name, len(value), "ids")
    return frozenset(_integer(name, token, 0, limits.vocab_size - 1) for token in value)


def _integer(name: str, value: Any, low: int, high: int, suffix: str = "") -> int:
    value = to_integer(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_argument(name, value, f"must be a whole number {low}..{high}{suffix}")
    if not low <= value <= high:
        raise invalid_argument(name, value, f"must be {low}..{high}{suffix}")
    return value


def _number(name: str, value: Any) -> float:
    """Parse a finite number."""
    value = to_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_argument(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise invalid_argument(name, str(value), "must be a finite number") from None
    if not math.isfinite(number):
        raise invalid_argument(name, str(value), "must be a finite number")
    return number
