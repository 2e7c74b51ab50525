"""What a client asks for and what it gets, free of tensors and of the wire."""

from __future__ import annotations

import difflib
import json
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from paged_backend.guided.structures import READERS as STRUCTURES
from paged_backend.guided.structures import Structure, read_structure

if TYPE_CHECKING:
    from paged_backend.sampling.masks import Guide

from paged_backend.scheduling.content import Key, root_key


class ErrorCode(Enum):
    """The stable classes that an error text starts with; the values are gRPC's names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """Ends one request. `str()` tells its class and what is wrong: `INVALID_ARGUMENT: max_tokens=0: must be 1..8192`.
    What of it UTF-8 cannot carry is written out: a parameter's name, which comes from JSON, may hold halves of
    characters. A message that clients of other backends compare as a whole is `verbatim`, without a class."""

    def __init__(self, code: ErrorCode, message: str, *, verbatim: bool = False):
        text = message if verbatim else f"{code.value}: {message}"
        super().__init__(text.encode(errors="backslashreplace").decode())
        self.code = code
        self.verbatim = verbatim


class QueueFull(RequestError):
    """As many requests wait as may."""

    def __init__(self, waiting: int):
        super().__init__(
            ErrorCode.UNAVAILABLE, f"{waiting} requests wait, which is max_queue_size; send it again later"
        )


def invalid(field_name: str, value: Any, limit: str) -> RequestError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestError(ErrorCode.INVALID_ARGUMENT, f"{field_name}={shown}: {limit}")


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can carry: JSON may hold halves of characters (lone surrogates)."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


class FinishReason(Enum):
    STOP = "stop"  # end-of-sequence token, a stop token id, or a stop string
    LENGTH = "length"  # max_tokens
    TIMEOUT = "timeout"  # the request's own time limit


@dataclass(frozen=True)
class EmbeddingSpec:
    """What embeddings a model gives."""

    size: int
    dimensions: Sequence[int] = ()  # to which they may be cut: what the model was trained for (Matryoshka)


@dataclass(frozen=True)
class Limits:
    """What the loaded model and pool allow."""

    max_model_len: int
    vocab_size: int
    num_blocks: int  # in the whole pool
    block_size: int
    max_num_seqs: int
    embedding: EmbeddingSpec | None = None  # None: the model gives none


MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_LOGIT_BIASES = 1024
MAX_BIASED_WORDS = 128
MAX_SALT_BYTES = 256
MAX_ADAPTER_NAME_BYTES = 256
MAX_LOGPROBS = 20
AS_MANY = 2**31 - 1  # as max_tokens: as many as the model's context and the pool have room for

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


def _number(name: str, value: Any) -> float:
    """A finite number; a numeric string counts, as request parameters may carry one."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise invalid(name, value, "must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        raise invalid(name, str(value), "must be a finite number") from None
    if not math.isfinite(number):
        raise invalid(name, str(value), "must be a finite number")
    return number


def _whole(name: str, value: Any, low: int, high: int) -> int:
    limit = f"must be {low}..{high}"
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise invalid(name, value, limit) from None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(name, value, limit)
    return value


def _between(low: float, high: float, *, above: bool = False) -> Callable[[str, Any, Limits], float]:
    limit = f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"

    def read(name: str, value: Any, limits: Limits) -> float:
        number = _number(name, value)
        if not low <= number <= high or (above and number == low):
            raise invalid(name, value, limit)
        return number

    return read


def _flag(name: str, value: Any, limits: Limits) -> bool:
    """0 and 1 count, and each as a string: request parameters may carry one."""
    known = {"true": True, "1": True, "false": False, "0": False}
    flag = known.get(str(value).lower()) if isinstance(value, str | int) else None
    if flag is None:
        raise invalid(name, value, "must be true or false")
    return flag


def _top_k(name: str, value: Any, limits: Limits) -> int:
    """0 and -1 both mean off, as in vLLM."""
    return max(0, _whole(name, value, -1, 2**31 - 1))


def _seed(name: str, value: Any, limits: Limits) -> int | None:
    return None if value is None else _whole(name, value, -(2**63), 2**64 - 1)


def _strings(most: int, most_bytes: int) -> Callable[[str, Any, Limits], tuple[str, ...]]:
    """A list of so many strings; one alone, or null for none, will do."""

    def read(name: str, value: Any, limits: Limits) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(strings, list | tuple) or not all(is_text(text) and text for text in strings):
            raise invalid(name, value, "must be a non-empty string of whole characters, or a list of them")
        if len(strings) > most:
            raise invalid(name, f"{len(strings)} strings", f"must be at most {most} strings")
        for text in strings:
            if len(text.encode(errors="replace")) > most_bytes:
                raise invalid(name, text, f"must be at most {most_bytes} bytes a string")
        return tuple(strings)

    return read


def _token_ids(name: str, value: Any, most: int, limits: Limits) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise invalid(name, value, "must be a list of token ids")
    if len(value) > most:
        raise invalid(name, f"{len(value)} ids", f"must be at most {most} ids")
    return frozenset(_whole(name, one, 0, limits.vocab_size - 1) for one in value)


def _stop_token_ids(name: str, value: Any, limits: Limits) -> frozenset[int]:
    return _token_ids(name, [] if value is None else value, MAX_STOP_TOKEN_IDS, limits)


def _allowed_token_ids(name: str, value: Any, limits: Limits) -> frozenset[int] | None:
    if value is None:
        return None
    ids = _token_ids(name, value, MAX_ALLOWED_TOKEN_IDS, limits)
    if not ids:
        raise invalid(name, value, "must have at least one id")
    return ids


_bias = _between(-100, 100)


def _logit_bias(name: str, value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and what is added to its logit, by id. Keys are strings, where they come from JSON."""
    biases = {} if value is None else value
    if not isinstance(biases, Mapping):
        raise invalid(name, value, 'must be an object like {"42": -100}, from token ids to numbers')
    if len(biases) > MAX_LOGIT_BIASES:
        raise invalid(name, f"{len(biases)} tokens", f"must be at most {MAX_LOGIT_BIASES} tokens")
    read: dict[int, float] = {}
    for key, bias in biases.items():
        token = _whole(name, key, 0, limits.vocab_size - 1)
        if token in read:
            raise invalid(name, key, f"token {token} is there twice")
        read[token] = _bias(f"{name}[{token}]", bias, limits)
    return tuple(sorted(read.items()))


def _word_bias(name: str, value: Any, limits: Limits) -> tuple[tuple[str, float], ...]:
    """Pairs of a word and what is added to the logits of its tokens."""
    biases = {} if value is None else value
    if not isinstance(biases, Mapping):
        raise invalid(name, value, 'must be an object like {"sea": 2.5}, from words to numbers')
    words = _strings(MAX_BIASED_WORDS, MAX_BAD_WORD_BYTES)(name, list(biases), limits)
    return tuple((word, _bias(f"{name}[{json.dumps(word)}]", biases[word], limits)) for word in words)


def _structure(name: str, value: Any, limits: Limits) -> Structure | None:
    try:
        return read_structure(name, value)
    except ValueError as error:
        raise invalid(name, value, str(error)) from None


def _samples(name: str, value: Any, limits: Limits) -> int:
    return _whole(name, value, 1, limits.max_num_seqs)


def _logprobs(name: str, value: Any, limits: Limits) -> int | None:
    return None if value is None else _whole(name, value, 0, MAX_LOGPROBS)


def _priority(name: str, value: Any, limits: Limits) -> int:
    return _whole(name, value, -(2**31), 2**31 - 1)


def _salt(name: str, value: Any, limits: Limits) -> str:
    if not is_text(value) or len(value.encode()) > MAX_SALT_BYTES:
        raise invalid(name, value, f"must be a string of whole characters, of at most {MAX_SALT_BYTES} bytes")
    return value


def _timeout_ms(name: str, value: Any, limits: Limits) -> int | None:
    return None if value is None else _whole(name, value, 1, 2**31 - 1)


def _adapter_name(name: str, value: Any, limits: Limits) -> str | None:
    if value is not None and (not is_text(value) or not 1 <= len(value.encode()) <= MAX_ADAPTER_NAME_BYTES):
        raise invalid(name, value, f"must be a string of whole characters, of 1..{MAX_ADAPTER_NAME_BYTES} bytes")
    return value


def _early_stopping(name: str, value: Any, limits: Limits) -> bool | str:
    if value == "never":
        return value
    try:
        return _flag(name, value, limits)
    except RequestError:
        raise invalid(name, value, 'must be true, false or "never"') from None


def _tokens_from(low: int) -> Callable[[str, Any, Limits], int]:
    return lambda name, value, limits: _whole(name, value, low, limits.max_model_len)


def _max_tokens(name: str, value: Any, limits: Limits) -> int:
    if value is None:
        return AS_MANY
    none = value in (0, "0") and not isinstance(value, bool)  # whether that may be is for `parse` to say
    return 0 if none else _whole(name, value, 1, limits.max_model_len)


def _truncate(name: str, value: Any, limits: Limits) -> int | None:
    return None if value is None else _whole(name, value, 1, limits.max_model_len)


def _param(read: Callable[[str, Any, Limits], Any], default: Any) -> Any:
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
    stop: tuple[str, ...] = _param(_strings(MAX_STOP_STRINGS, MAX_STOP_BYTES), ())
    stop_token_ids: frozenset[int] = _param(_stop_token_ids, frozenset())
    ignore_eos: bool = _param(_flag, False)
    repetition_penalty: float = _param(_between(0, 100, above=True), 1.0)
    presence_penalty: float = _param(_between(-2, 2), 0.0)
    frequency_penalty: float = _param(_between(-2, 2), 0.0)
    logit_bias: tuple[tuple[int, float], ...] = _param(_logit_bias, ())
    word_bias: tuple[tuple[str, float], ...] = _param(_word_bias, ())
    bad_words: tuple[str, ...] = _param(_strings(MAX_BAD_WORDS, MAX_BAD_WORD_BYTES), ())
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
    def parse(cls, values: Mapping[str, Any], limits: Limits) -> SamplingParams:
        """Raises RequestError that names the first parameter that is unknown, of a wrong type or out of range."""
        readers = {spec.name: spec.metadata["read"] for spec in fields(cls)}
        read = {}
        for name, value in values.items():
            if name in _REFUSED:
                if value is not None and not any(value == one and type(value) is type(one) for one in _REFUSED[name]):
                    raise invalid(name, value, "not supported yet; leave it out")
            elif name in readers:
                if value is not None or name in _NULL_IS_NO_LIMIT:
                    read[name] = readers[name](name, value, limits)
            else:
                near = difflib.get_close_matches(str(name), readers, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(readers)}"
                raise invalid(name, value, f"unknown sampling parameter; {hint}")
        params = cls(**read)
        if params.max_tokens == 0 and params.prompt_logprobs is None and not params.echo:
            raise invalid("max_tokens", 0, f"must be 1..{limits.max_model_len}, or 0 with prompt_logprobs or echo")
        params.check_min_tokens()
        if params.best_of is not None and params.best_of < params.n:
            raise invalid("best_of", params.best_of, f"must be n={params.n}..{limits.max_num_seqs}")
        params._check_structure()
        params._check_beams()
        return params

    def check_min_tokens(self) -> None:
        """Raises RequestError for more than there may be at all."""
        if self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", self.min_tokens, f"must be 0..max_tokens={self.max_tokens}")

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
            raise invalid("beam_width", self.beam_width, f"must be 1 with {field}")
        if self.ignore_eos:
            raise invalid("ignore_eos", True, f"must be false with {field}, which ends with the end of sequence")

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def num_samples(self) -> int:
        """Samples that are drawn; of a beam search, outputs."""
        return self.best_of or self.n

    @property
    def picks(self) -> bool:
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
                    raise invalid(name, getattr(self, name), "has a meaning with beam_width above 1 only")
            return
        if self.picks:
            raise invalid("best_of", self.best_of, f"must be n={self.n} with beam_width={self.beam_width}")
        if self.n > self.beam_width:
            raise invalid("n", self.n, f"must be 1..beam_width={self.beam_width}")
        for name in _NOT_WITH_BEAMS:
            if name in changed and not (name == "temperature" and self.temperature == 0):
                raise invalid(name, getattr(self, name), f"has no meaning with beam_width={self.beam_width}; leave it"
                              " out")  # fmt: skip


PARAMETER_NAMES = frozenset(spec.name for spec in fields(SamplingParams)) | frozenset(_REFUSED)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter, as its files were when they were read."""

    name: str
    digest: bytes  # of the files: adapters of equal digest are one
    rank: int
    factors: Mapping[str, Any] = field(repr=False)  # by linear layer, for whoever computes


@dataclass(frozen=True)
class GenerateRequest:
    """One validated request. `key` is ours and unique; the client's request id need not be."""

    key: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # the request's own, or one drawn for it
    stop_ids: frozenset[int]  # token ids that end the output: end of sequence (unless ignored) and stop_token_ids
    embeds: bool = False  # wants the hidden state of its last token, and draws none
    wants_usage: bool = False
    session: Hashable = None  # whose next turn will go on from this one's blocks
    logprobs: int | None = None  # likeliest tokens to be told with each, beside its own log probability; None: neither
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the output must not have
    allowed: bytes | None = None  # bitmask of the tokens that may be drawn; None: all
    adapter: Adapter | None = None
    guides: tuple[Guide, ...] = ()  # of each sample, which of them may come next; none: any

    @cached_property
    def is_constrained(self) -> bool:
        """Whether any token may be forbidden or favoured."""
        sampling = self.sampling
        masked = self.allowed is not None or bool(self.guides)
        return bool(masked or sampling.min_tokens or sampling.logit_bias or self.bad_words)

    @cached_property
    def biases(self) -> tuple[array[int], array[float]]:
        """Tokens (int64) and what is always added to their logits (float32): -infinity for a bad word of one token."""
        words = ((word[0], -math.inf) for word in self.bad_words if len(word) == 1)
        pairs = [*self.sampling.logit_bias, *words]
        return array("q", [token for token, _ in pairs]), array("f", [value for _, value in pairs])

    @cached_property
    def endings(self) -> dict[int, list[tuple[list[int], int]]]:
        """Bad words of several tokens, by the last but one: those before it, and the last."""
        found: dict[int, list[tuple[list[int], int]]] = {}
        for *before, latest, last in (word for word in self.bad_words if len(word) > 1):
            found.setdefault(latest, []).append((before, last))
        return found

    @property
    def reads_output(self) -> bool:
        """Whether how a token is drawn depends on others of the output, beside what the model makes of them."""
        return self.sampling.has_penalty or bool(self.endings)

    @property
    def root(self) -> Key:
        """Where the keys of its blocks begin: what other tenants or adapters computed is not for it."""
        return root_key(self.sampling.cache_salt, self.adapter.digest if self.adapter else b"")

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which requests are served: by priority, and within one by arrival."""
        return self.sampling.priority, self.key

    @classmethod
    def admit(
        cls,
        key: int,
        tokens: list[int],
        sampling: SamplingParams,
        seed: int,
        eos: frozenset[int],
        limits: Limits,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> GenerateRequest:
        """Raises RequestError for a prompt that is empty, or a request that can never fit the model or the pool, or may
        find no token that it can draw."""
        prompt = len(tokens)
        if prompt == 0:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "text_input: the prompt is empty; give at least one token")
        sampling = fitted(prompt, sampling, limits)
        if max(tokens) >= limits.vocab_size:  # the tokenizer knows tokens that the model has no embedding for
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"text_input: holds token {max(tokens)}, but the model's vocabulary ends at {limits.vocab_size - 1}",
            )
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos)
        allowed = None
        if sampling.allowed_token_ids is not None:
            endings = stop_ids if sampling.min_tokens else frozenset()
            if sampling.allowed_token_ids <= endings.union(word[-1] for word in bad_words):
                raise invalid("allowed_token_ids", sorted(sampling.allowed_token_ids), "bad_words and min_tokens may"
                              " forbid all of them")  # fmt: skip
            allowed = bitmask(sampling.allowed_token_ids, limits.vocab_size)
        return cls(key, tuple(tokens), sampling, seed, stop_ids, bad_words=bad_words, allowed=allowed)


def bitmask(tokens: Iterable[int], vocab_size: int) -> bytes:
    """Bit t % 8 of byte t // 8 is set where token t is among them; in whole 32 bits."""
    bits = bytearray(4 * -(-vocab_size // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def fitted(prompt: int, sampling: SamplingParams, limits: Limits) -> SamplingParams:
    """The same with a number of output tokens that fits the model and the pool after a prompt of so many tokens. Raises
    RequestError where none does, or not as many as are asked for."""
    check_prompt_length(prompt, sampling.max_tokens, limits)
    output, count = sampling.max_tokens, sampling.num_seqs
    room = limits.max_model_len - prompt
    if output != AS_MANY and output > room:
        raise invalid("max_tokens", output, f"must be 1..{room} after a prompt of {prompt} tokens"
                      f" (max_model_len is {limits.max_model_len})")  # fmt: skip
    at_once = blocks_at_most(prompt, 1, count, limits.block_size)
    if at_once > limits.num_blocks:
        raise invalid("prompt_tokens", prompt, f"needs {at_once} blocks of the key/value pool, which has"
                      f" {limits.num_blocks}")  # fmt: skip
    if output == AS_MANY:
        sampling = replace(sampling, max_tokens=min(room, tokens_at_most(prompt, count, limits)))
        sampling.check_min_tokens()
        return sampling
    needed = blocks_at_most(prompt, output, count, limits.block_size)
    if needed > limits.num_blocks:
        kind = "samples" if sampling.beam_width == 1 else "beams"
        of = f" of {count} {kind}" if count > 1 else ""
        raise invalid("max_tokens", output, f"prompt and output{of} need {needed} blocks of the key/value pool,"
                      f" which has {limits.num_blocks}")  # fmt: skip
    return sampling


def check_prompt_length(count: int, max_tokens: int, limits: Limits) -> None:
    """Raises RequestError for a prompt that leaves no room for an output, if there is to be one."""
    left = min(max_tokens, 1)
    if count + left > limits.max_model_len:
        generates = ", and one token must be left to generate" * left
        raise invalid("prompt_tokens", count, f"must be 1..{limits.max_model_len - left} (max_model_len is"
                      f" {limits.max_model_len}{generates})")  # fmt: skip


def blocks_at_most(prompt: int, output: int, n: int, block_size: int) -> int:
    """Blocks that a request holds at its end: the prompt's full ones once, the rest for each sample. The last token's
    keys and values are never needed."""
    shared = prompt // block_size if n > 1 else 0
    return shared + n * (-(-(prompt + output - 1) // block_size) - shared)


def tokens_at_most(prompt: int, n: int, limits: Limits) -> int:
    """How long an output may be so that `blocks_at_most` is no more than the pool has."""
    shared = prompt // limits.block_size if n > 1 else 0
    each = shared + (limits.num_blocks - shared) // n
    return each * limits.block_size - prompt + 1


class Usage(NamedTuple):
    """What a request has taken so far."""

    cached_tokens: int  # of its prompt, found in the cache when it was first let in
    blocks_new: int  # blocks that it was given, each time it was
    blocks_reused: int  # blocks that it found
    blocks_copied: int  # copies on write, among the new ones
    blocks_from_host: int  # brought back from the host's memory, among the new ones
    preemptions: int
    preempted_seconds: float  # from those until it was let in again
    guessed_tokens: int = 0  # that were checked
    accepted_tokens: int = 0  # of those


class TokenLogprob(NamedTuple):
    """What the model's own distribution, before temperature, penalties and filters, has for a token."""

    token: int
    logprob: float  # natural logarithm
    rank: int  # 1 + how many tokens have a higher logit


Logprobs = tuple[TokenLogprob, ...]  # of a token that was drawn, then of the likeliest others, the first first
HiddenState = array  # of float32: what the model's last layer gives for a token, normalised as its head wants it


class TokenDelta(NamedTuple):
    """What one step gave one sample of a request. Exactly one delta of a sample has `finish` set, its last; or else
    one of the request has `error` set, which ends all its samples."""

    key: int
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: RequestError | None = None
    sample: int = 0  # which of the request's
    usage: Usage | None = None  # where the request asked for it
    logprobs: tuple[Logprobs, ...] = ()  # of each token, where the request asked for them
    hidden: HiddenState | None = None  # of the prompt's last token, of a request that embeds
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # of each token of the prompt after the first, once for all

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None
