"""How a client wants its tokens drawn: every parameter by name, with its range and its default."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paged_backend.api.errors import ErrorCode, RequestError, closest_match, invalid_argument, is_utf8_text
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits
from paged_backend.api.structures import READERS as STRUCTURES
from paged_backend.api.structures import Structure, read_structure

_REFUSED: dict[str, tuple[Any, ...]] = {  # vLLM's names that mean nothing here yet, and the values that ask for nothing
    "use_beam_search": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "flat_logprobs": (False,),
    "skip_reading_prefix_cache": (False,),
    "logits_processors": ([],),
    "extra_args": ({},),
}


_NULL_IS_NO_LIMIT = ("max_tokens",)  # any other that is null has its default

_NOT_WITH_BEAMS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _numeral(text: str) -> str:
    """Of what Python reads as numbers not its `1_0`, nor other scripts' digits."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _number(name: str, value: Any) -> float:
    """A finite number; a numeric string counts, as request parameters may carry one."""
    if isinstance(value, str):
        try:
            value = float(_numeral(value))
        except ValueError:
            raise invalid_argument(name, value, "must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_argument(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise invalid_argument(name, str(value), "must be a finite number") from None
    if not math.isfinite(number):
        raise invalid_argument(name, str(value), "must be a finite number")
    return number


def _whole(name: str, value: Any, low: int, high: int, why: str = "") -> int:
    limit = f"must be {low}..{high}{why}"
    if isinstance(value, str):
        try:
            value = int(_numeral(value))
        except ValueError:
            raise invalid_argument(name, value, limit) from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid_argument(name, value, limit)
    return value


def _between(low: float, high: float, *, above: bool = False) -> Callable[[str, Any, EngineLimits], float]:
    limit = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"

    def read(name: str, value: Any, limits: EngineLimits) -> float:
        number = _number(name, value)
        if not low <= number <= high or (above and number == low):
            raise invalid_argument(name, value, limit)
        return number

    return read


def _flag(name: str, value: Any, limits: EngineLimits) -> bool:
    """0 and 1 count, and each as a string: request parameters may carry one."""
    known = {"true": True, "1": True, "false": False, "0": False}
    flag = known.get(str(value).lower()) if isinstance(value, str | int) else None
    if flag is None:
        raise invalid_argument(name, value, "must be true or false")
    return flag


def _top_k(name: str, value: Any, limits: EngineLimits) -> int:
    """0 and -1 both mean off, as in vLLM."""
    return max(0, _whole(name, value, -1, 2**31 - 1))


def _seed(name: str, value: Any, limits: EngineLimits) -> int | None:
    return None if value is None else _whole(name, value, -(2**63), 2**64 - 1)


def _strings(most: str, most_bytes: str) -> Callable[[str, Any, EngineLimits], tuple[str, ...]]:
    """A list of strings; one alone, or null for none, will do. most, most_bytes: the options that bound it."""

    def read(name: str, value: Any, limits: EngineLimits) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(strings, list | tuple) or not all(is_utf8_text(text) and text for text in strings):
            raise invalid_argument(name, value, "must be a non-empty string of whole characters, or a list of them")
        limits.input_limits.check(most, name, len(strings), "strings")
        for text in strings:
            limits.input_limits.check(most_bytes, name, len(text.encode()), "bytes")
        return tuple(strings)

    return read


def _token_ids(name: str, value: Any, most: str, limits: EngineLimits) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise invalid_argument(name, value, "must be a list of token ids")
    limits.input_limits.check(most, name, len(value), "ids")
    return frozenset(_whole(name, one, 0, limits.vocab_size - 1) for one in value)


def _stop_token_ids(name: str, value: Any, limits: EngineLimits) -> frozenset[int]:
    return _token_ids(name, [] if value is None else value, "max_stop_token_ids", limits)


def _words_of_tokens(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[int, ...], ...]:
    """Each a run of token ids."""
    words = [] if value is None else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, list | tuple) for word in words):
        raise invalid_argument(name, value, "must be a list of lists of token ids")
    limits.input_limits.check("max_token_words", name, len(words), "words")
    most = limits.input_limits.max_token_word_ids
    for word in words:
        if not 1 <= len(word) <= most:
            raise invalid_argument(name, f"{len(word)} ids", f"must be 1..{most} ids a word (max_token_word_ids)")
    return tuple(tuple(_whole(name, one, 0, limits.vocab_size - 1) for one in word) for word in words)


def _allowed_token_ids(name: str, value: Any, limits: EngineLimits) -> frozenset[int] | None:
    if value is None:
        return None
    ids = _token_ids(name, value, "max_allowed_token_ids", limits)
    if not ids:
        raise invalid_argument(name, value, "must have at least one id")
    return ids


_bias = _between(-100, 100)


def _logit_bias(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and what is added to its logit, by id. Keys are strings, where they come from JSON."""
    biases = {} if value is None else value
    if not isinstance(biases, Mapping):
        raise invalid_argument(name, value, 'must be an object like {"42": -100}, from token ids to numbers')
    limits.input_limits.check("max_logit_biases", name, len(biases), "tokens")
    read: dict[int, float] = {}
    for key, bias in biases.items():
        token = _whole(name, key, 0, limits.vocab_size - 1)
        if token in read:
            raise invalid_argument(name, key, f"token {token} is there twice")
        read[token] = _bias(f"{name}[{token}]", bias, limits)
    return tuple(sorted(read.items()))


def _word_bias(name: str, value: Any, limits: EngineLimits) -> tuple[tuple[str, float], ...]:
    """Pairs of a word and what is added to the logits of its tokens."""
    biases = {} if value is None else value
    if not isinstance(biases, Mapping):
        raise invalid_argument(name, value, 'must be an object like {"sea": 2.5}, from words to numbers')
    words = _strings("max_biased_words", "max_word_bytes")(name, list(biases), limits)
    return tuple((word, _bias(f"{name}[{json.dumps(word)}]", biases[word], limits)) for word in words)


def _structure(name: str, value: Any, limits: EngineLimits) -> Structure | None:
    try:
        return read_structure(name, value, limits.input_limits)
    except ValueError as error:
        raise invalid_argument(name, value, str(error)) from None


def _samples(name: str, value: Any, limits: EngineLimits) -> int:
    return _whole(name, value, 1, limits.max_num_seqs)


def _logprobs(name: str, value: Any, limits: EngineLimits) -> int | None:
    return None if value is None else _whole(name, value, 0, limits.input_limits.max_logprobs, " (max_logprobs)")


def _priority(name: str, value: Any, limits: EngineLimits) -> int:
    return _whole(name, value, limits.input_limits.min_priority, 2**31 - 1, " (min_priority)")


def _salt(name: str, value: Any, limits: EngineLimits) -> str:
    if not is_utf8_text(value):
        raise invalid_argument(name, value, "must be a string of whole characters")
    limits.input_limits.check("max_salt_bytes", name, len(value.encode()), "bytes")
    return value


def _timeout_ms(name: str, value: Any, limits: EngineLimits) -> int | None:
    return None if value is None else _whole(name, value, 1, 2**31 - 1)


def _adapter_name(name: str, value: Any, limits: EngineLimits) -> str | None:
    if value is None:
        return None
    if not is_utf8_text(value) or not value:
        raise invalid_argument(name, value, "must be a string of whole characters, not empty")
    limits.input_limits.check("max_adapter_name_bytes", name, len(value.encode()), "bytes")
    return value


def _early_stopping(name: str, value: Any, limits: EngineLimits) -> bool | str:
    if value == "never":
        return value
    try:
        return _flag(name, value, limits)
    except RequestError:
        raise invalid_argument(name, value, 'must be true, false or "never"') from None


def _tokens_from(low: int) -> Callable[[str, Any, EngineLimits], int]:
    return lambda name, value, limits: _whole(name, value, low, limits.max_model_len)


def _max_tokens(name: str, value: Any, limits: EngineLimits) -> int:
    if value is None:
        return UNBOUNDED_MAX_TOKENS
    none = value in (0, "0") and not isinstance(value, bool)  # whether that may be is for `parse` to say
    return 0 if none else _whole(name, value, 1, limits.max_model_len)


def _truncate(name: str, value: Any, limits: EngineLimits) -> int | None:
    return None if value is None else _whole(name, value, 1, limits.max_model_len)


def _param(read: Callable[[str, Any, EngineLimits], Any], default: Any) -> Any:
    return field(default=default, metadata={"read": read})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens and when to stop; names, meanings and defaults are vLLM's."""

    max_tokens: int = _param(_max_tokens, 16)
    min_tokens: int = _param(_tokens_from(0), 0)
    temperature: float = _param(_between(0, 100), 1.0)  # 0: greedy
    top_k: int = _param(_top_k, 0)
    top_p: float = _param(_between(0, 1, above=True), 1.0)
    min_p: float = _param(_between(0, 1), 0.0)
    seed: int | None = _param(_seed, None)
    stop: tuple[str, ...] = _param(_strings("max_stop_strings", "max_stop_bytes"), ())
    stop_token_ids: frozenset[int] = _param(_stop_token_ids, frozenset())
    stop_words_token_ids: tuple[tuple[int, ...], ...] = _param(_words_of_tokens, ())  # part of the output they end
    ignore_eos: bool = _param(_flag, False)
    repetition_penalty: float = _param(_between(0, 100, above=True), 1.0)
    presence_penalty: float = _param(_between(-2, 2), 0.0)
    frequency_penalty: float = _param(_between(-2, 2), 0.0)
    logit_bias: tuple[tuple[int, float], ...] = _param(_logit_bias, ())
    word_bias: tuple[tuple[str, float], ...] = _param(_word_bias, ())
    bad_words: tuple[str, ...] = _param(_strings("max_bad_words", "max_word_bytes"), ())
    bad_words_token_ids: tuple[tuple[int, ...], ...] = _param(_words_of_tokens, ())
    allowed_token_ids: frozenset[int] | None = _param(_allowed_token_ids, None)  # None: all
    json_schema: Structure | None = _param(_structure, None)  # this and those below: what the output must look like
    json_object: Structure | None = _param(_structure, None)
    regex: Structure | None = _param(_structure, None)
    choice: Structure | None = _param(_structure, None)
    grammar: Structure | None = _param(_structure, None)
    structured_outputs: Structure | None = _param(_structure, None)
    guided_decoding: Structure | None = _param(_structure, None)
    skip_special_tokens: bool = _param(_flag, True)
    include_stop_str_in_output: bool = _param(_flag, False)
    logprobs: int | None = _param(_logprobs, None)  # how many of the likeliest are told with each token
    prompt_logprobs: int | None = _param(_logprobs, None)  # and with each of the prompt's, after the first
    echo: bool = _param(_flag, False)  # whether the prompt's text comes before the output
    n: int = _param(_samples, 1)  # samples of the prompt, or of beam_width outputs how many are returned
    best_of: int | None = _param(_samples, None)  # samples that are drawn, the likeliest n of which are returned
    beam_width: int = _param(_samples, 1)  # above 1: beam search
    length_penalty: float = _param(_between(-10, 10), 1.0)  # a score is log-probability / length ** length_penalty
    early_stopping: bool | str = _param(_early_stopping, False)
    add_special_tokens: bool = _param(_flag, True)  # those that the tokenizer puts around text
    truncate_prompt_tokens: int | None = _param(_truncate, None)  # how many of the prompt are kept, its last
    priority: int = _param(_priority, 0)  # the lowest number goes first, as in vLLM
    cache_salt: str = _param(_salt, "")  # requests of different salts share no blocks
    lora_name: str | None = _param(_adapter_name, None)  # an adapter that the request goes through
    timeout_ms: int | None = _param(_timeout_ms, None)  # from arrival; what there is then is the answer

    @classmethod
    def parse(cls, values: Mapping[str, Any], limits: EngineLimits) -> SamplingParams:
        """Raises RequestError that names the first parameter that is unknown, of a wrong type or out of range."""
        readers = {spec.name: spec.metadata["read"] for spec in fields(cls)}
        read = {}
        for name, value in values.items():
            if name in _REFUSED:
                if value is not None and not any(value == one and type(value) is type(one) for one in _REFUSED[name]):
                    raise invalid_argument(name, value, "not supported yet; leave it out")
            elif name in readers:
                if value is not None or name in _NULL_IS_NO_LIMIT:
                    read[name] = readers[name](name, value, limits)
            else:
                near = closest_match(name, readers)
                hint = f"did you mean {near}?" if near else f"known are {', '.join(readers)}"
                raise invalid_argument(name, value, f"unknown sampling parameter; {hint}")
        params = cls(**read)
        if params.max_tokens == 0 and params.prompt_logprobs is None and not params.echo:
            raise invalid_argument(
                "max_tokens", 0, f"must be 1..{limits.max_model_len}, or 0 with prompt_logprobs or echo"
            )
        params.check_min_tokens()
        if params.best_of is not None and params.best_of < params.n:
            raise invalid_argument("best_of", params.best_of, f"must be n={params.n}..{limits.max_num_seqs}")
        params._check_structure()
        params._check_beams()
        return params

    def check_min_tokens(self) -> None:
        """Raises RequestError for more than there may be at all."""
        if self.min_tokens > self.max_tokens:
            raise invalid_argument("min_tokens", self.min_tokens, f"must be 0..max_tokens={self.max_tokens}")

    @property
    def structure(self) -> Structure | None:
        """What the output must look like; None: anything."""
        return next(iter(self._structures), None)

    @property
    def _structures(self) -> list[Structure]:
        return [one for one in (getattr(self, name) for name in STRUCTURES) if one is not None]

    def _check_structure(self) -> None:
        asked = self._structures
        if not asked:
            return
        if len(asked) > 1:
            fields = " and ".join(one.field for one in asked)
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{fields}: say what the output must look like; give one")
        field = asked[0].field
        if self.beam_width > 1:
            raise invalid_argument("beam_width", self.beam_width, f"must be 1 with {field}")
        if self.ignore_eos:
            raise invalid_argument(
                "ignore_eos", True, f"must be false with {field}, which ends with the end of sequence"
            )

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def num_samples(self) -> int:
        """Samples that are drawn; of a beam search, outputs."""
        return self.best_of or self.n

    @property
    def selects_best_of(self) -> bool:
        """Whether some samples are drawn and not returned."""
        return self.num_samples > self.n

    @property
    def num_seqs(self) -> int:
        """Sequences that compute at the same time, at the most."""
        return max(self.num_samples, self.beam_width)

    def _check_beams(self) -> None:
        """Raises RequestError for what would have no effect: beams take the likeliest, and only they have scores."""
        changed = [spec.name for spec in fields(self) if getattr(self, spec.name) != spec.default]
        if self.beam_width == 1:
            for name in ("length_penalty", "early_stopping"):
                if name in changed:
                    raise invalid_argument(name, getattr(self, name), "has a meaning with beam_width above 1 only")
            return
        if self.selects_best_of:
            raise invalid_argument("best_of", self.best_of, f"must be n={self.n} with beam_width={self.beam_width}")
        if self.n > self.beam_width:
            raise invalid_argument("n", self.n, f"must be 1..beam_width={self.beam_width}")
        for name in _NOT_WITH_BEAMS:
            if name in changed and not (name == "temperature" and self.temperature == 0):
                raise invalid_argument(
                    name, getattr(self, name), f"has no meaning with beam_width={self.beam_width}; leave it out"
                )


PARAMETER_NAMES = frozenset(spec.name for spec in fields(SamplingParams)) | frozenset(_REFUSED)
