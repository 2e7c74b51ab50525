"""Sampling parameters of a request.

To add a parameter, declare a field of SamplingParams: its parser, which validates it, its default and its description.
It is then accepted in `sampling_parameters` and as a request parameter. The OpenAI gateway has a list of its own,
`SamplingFields` in client/paged_client/openai/schema.py, which a test compares with this one. `make reference` adds the
parameter to docs/reference/sampling_parameters.md. The code that applies it reads it from `GenerateRequest.sampling`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.api import parameter_parsers as parsers
from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError, hint, invalid_argument
from paged_backend.api.limits import UNBOUNDED_MAX_TOKENS, EngineLimits, SamplingDefaults
from paged_backend.api.other_engines import UNSUPPORTED_PARAMETERS, check_parameter, suggestion
from paged_backend.api.parameter_parsers import parameter
from paged_backend.api.structures import STRUCTURE_PARAMETERS, Structure

_NULL_IS_A_VALUE = ("max_tokens",)  # parameters in which null does not select the default


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Parameters that vLLM has too have the same name, meaning and default."""

    max_tokens: int = parameter(
        parsers.max_tokens,
        16,
        "Maximum number of output tokens, including the end-of-sequence token. `null`: as many as `max_model_len` and"
        " the KV cache have room for, or the model's `max_new_tokens`. May be 0 with `prompt_logprobs` or `echo`; is 0"
        " with `prefill_only`.",
        section="Length",
    )
    min_tokens: int = parameter(
        parsers.tokens(0), 0, "Minimum number of output tokens before the end-of-sequence token or a stop token id."
    )
    thinking_token_budget: int | None = parameter(
        parsers.token_budget,
        None,
        "Maximum number of reasoning tokens of each output, after which the model's end mark of reasoning is forced."
        " 0: no reasoning. `null` or -1: no limit. Needs a model whose chat template has"
        " [marks of reasoning](../guides/requests.md#limit-reasoning). Not with structured outputs or `beam_width`.",
    )
    temperature: float = parameter(
        parsers.between(0, 100), 1.0, "Sampling temperature. 0: greedy.", section="Sampling", with_beams=False
    )
    top_k: int = parameter(
        parsers.top_k, 0, "Sample from the `top_k` most likely tokens. 0 or -1: from all.", with_beams=False
    )
    top_p: float = parameter(
        parsers.between(0, 1, above=True),
        1.0,
        "Sample from the most likely tokens whose probabilities add up to `top_p` (nucleus sampling).",
        with_beams=False,
    )
    min_p: float = parameter(
        parsers.between(0, 1),
        0.0,
        "Sample from tokens with at least `min_p` times the probability of the most likely token.",
        with_beams=False,
    )
    seed: int | None = parameter(
        parsers.integer(-(2**63), 2**64 - 1),
        None,
        "Seed of the request. In float32 the same seed and request give the same tokens, whatever else runs in the"
        " batch, unless two candidates differ by less than the rounding error."
        " In 16 bits, or with 8-bit keys and values, rounding depends on the batch and on cache hits, which"
        " often changes sampled tokens, except with the option `batch_invariant`.",
        with_beams=False,
    )
    repetition_penalty: float = parameter(
        parsers.between(0, 100, above=True),
        1.0,
        "Penalty on tokens of the prompt and the output, as a factor. Above 1 makes them less likely.",
        with_beams=False,
    )
    presence_penalty: float = parameter(
        parsers.between(-2, 2), 0.0, "Subtracted once from the logits of tokens in the output.", with_beams=False
    )
    frequency_penalty: float = parameter(
        parsers.between(-2, 2),
        0.0,
        "Subtracted from the logits of tokens in the output, for each occurrence.",
        with_beams=False,
    )
    stop: tuple[str, ...] = parameter(
        parsers.strings("max_stop_strings", "max_stop_bytes"),
        (),
        "String or list of strings that end the output, matched across token boundaries. At most 16"
        " (`limits.max_stop_strings`) of 256 bytes (`limits.max_stop_bytes`).",
        section="Stopping",
    )
    stop_token_ids: frozenset[int] = parameter(
        parsers.stop_token_ids,
        frozenset(),
        "Token ids that end the output. At most 256 (`limits.max_stop_token_ids`).",
    )
    stop_words_token_ids: tuple[tuple[int, ...], ...] = parameter(
        parsers.token_words,
        (),
        "Words that end the output and are part of it, each a list of token ids. At most 1,024"
        " (`limits.max_token_words`) of 64 tokens (`limits.max_token_word_ids`).",
    )
    ignore_eos: bool = parameter(parsers.flag, False, "Continue after the end-of-sequence token.")
    include_stop_str_in_output: bool = parameter(parsers.flag, False, "Keep the stop string at the end of the output.")
    timeout_ms: int | None = parameter(
        parsers.integer(1, 2**31 - 1),
        None,
        "Milliseconds after arrival at which the request ends with the output so far and the finish reason `timeout`.",
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        parsers.logit_bias,
        (),
        'Object from token ids to numbers from -100 to 100 that are added to their logits, like `{"42": -100}`. At'
        " most 1,024 tokens (`limits.max_logit_biases`).",
        section="Allowed tokens and biases",
    )
    word_bias: tuple[tuple[str, float], ...] = parameter(
        parsers.word_bias,
        (),
        "Object from words to numbers from -100 to 100 that are added to the logits of each of their tokens, like"
        ' `{"sea": 2.5}`. At most 128 words (`limits.max_biased_words`) of 256 bytes (`limits.max_word_bytes`).',
    )
    bad_words: tuple[str, ...] = parameter(
        parsers.strings("max_bad_words", "max_word_bytes"),
        (),
        "Strings that the output must not contain, at its beginning or after a space, or inside other text. Like in"
        " vLLM they are matched as tokens of the output, not as text. At most 128 (`limits.max_bad_words`) of 256 bytes"
        " (`limits.max_word_bytes`).",
    )
    bad_words_token_ids: tuple[tuple[int, ...], ...] = parameter(
        parsers.token_words,
        (),
        "Words that the output must not contain, each a list of token ids. Same limits as `stop_words_token_ids`.",
    )
    allowed_token_ids: frozenset[int] | None = parameter(
        parsers.allowed_token_ids,
        None,
        "Token ids that the output may contain. At most 16,384 (`limits.max_allowed_token_ids`). Rejected if"
        " `bad_words` and `min_tokens` could forbid all of them.",
    )
    json_schema: Structure | None = parameter(
        parsers.structure,
        None,
        "JSON that is valid for this schema: an object, or a string that holds one. Properties come in the schema's"
        " order. Unsupported keywords such as `uniqueItems`, `not` or `if` are rejected by name.",
        section="Structured outputs (at most one of them)",
    )
    json_object: Structure | None = parameter(parsers.structure, None, "`true`: any JSON object.")
    regex: Structure | None = parameter(
        parsers.structure,
        None,
        "Text that matches this regular expression as a whole. Look-around and back-references are not supported.",
    )
    choice: Structure | None = parameter(
        parsers.structure, None, "One of these strings, at most 1,024 (`limits.max_choices`)."
    )
    grammar: Structure | None = parameter(
        parsers.structure,
        None,
        "Text of this grammar, in llama.cpp's EBNF (`root ::= ...`) or in"
        " [Lark](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) (`start: ...`). A Lark grammar may"
        " name special tokens (`<|im_start|>`) and token ids (`<[300]>`).",
    )
    structured_outputs: Structure | None = parameter(
        parsers.structure,
        None,
        "Object with one of `json`, `json_object`, `regex`, `choice` and `grammar`, as vLLM's clients send it. Next to"
        " `json` and `json_object` it may have `disable_any_whitespace` or `whitespace_pattern`.",
    )
    guided_decoding: Structure | None = parameter(
        parsers.structure, None, "Same as `structured_outputs`, under the name of earlier versions of vLLM."
    )
    logprobs: int | None = parameter(
        parsers.logprobs,
        None,
        "Number of most likely tokens that the output `logprobs` lists for each output token, next to that token"
        " itself. At most 20 (`limits.max_logprobs`). Log probabilities are the `log_softmax` of the model's logits in"
        " float32, before any other sampling parameter. A rank is 1 + the number of tokens with a higher logit.",
        section="Log probabilities and text",
    )
    prompt_logprobs: int | None = parameter(
        parsers.logprobs,
        None,
        "The same for the tokens of the prompt, except the first. At most 256 of them are computed per step. The whole"
        " prompt is computed, even if it is in the prefix cache, unless the option `batch_invariant` is set: then the"
        " cache [has log probabilities, too](../guides/requests.md#score-a-prompt).",
    )
    logits_digest: bool = parameter(
        parsers.flag,
        False,
        "Return a digest of the logits of each output in the receipt (`logits_digests`): SHA-256 in hexadecimal digits"
        " over every bit of the logits from which its tokens were chosen, before any other sampling parameter, and with"
        " `prompt_logprobs` also over those of the prompt. Needs `return_receipt`. Equal for equal requests with the"
        " option `batch_invariant`; without it, digests may differ between runs.",
    )
    echo: bool = parameter(
        parsers.flag,
        False,
        "Put the prompt's text before the output, also when streaming and regardless of `exclude_input_in_output`. Not"
        " with `messages`.",
    )
    skip_special_tokens: bool = parameter(parsers.flag, True, "Leave special tokens out of the text.")
    n: int = parameter(
        parsers.samples,
        1,
        "Number of outputs, at most `max_num_seqs`. Sample i of a request with seed s has the tokens of a request with"
        " seed s + i.",
        section="Several samples and beam search",
    )
    best_of: int | None = parameter(
        parsers.samples,
        None,
        "Number of samples to generate, of which the `n` with the highest cumulative log probability are returned, best"
        " first. Default: `n`. A value above `n` excludes `stream` and `beam_width`.",
    )
    beam_width: int = parameter(
        parsers.samples,
        1,
        "Above 1: beam search with the outputs of transformers' `generate(num_beams=...)`, of which the best `n` are"
        " returned. When streaming, text is sent as soon as all beams agree on it. Parameters under Sampling must"
        " have their defaults, but `temperature` may be 0.",
    )
    length_penalty: float = parameter(
        parsers.between(-10, 10),
        1.0,
        "Beam search: a beam's log probability is divided by its length to this power.",
    )
    early_stopping: bool | str = parameter(
        parsers.early_stopping, False, 'Beam search: `true`, `false` or `"never"`, as in transformers.'
    )
    add_special_tokens: bool = parameter(
        parsers.flag,
        True,
        "Let the tokenizer add its special tokens to `text_input`. It never adds them to other inputs.",
        section="Prompt",
    )
    truncate_prompt_tokens: int | None = parameter(
        parsers.kept_tokens,
        None,
        "Keep only this many tokens of a longer prompt: the last ones, or the first ones if the model is an encoder."
        " -1: as many as the context length allows beside `max_tokens`, or beside one token if `max_tokens` is `null`."
        " Not in a session.",
    )
    priority: int = parameter(
        parsers.priority,
        0,
        "Requests with a lower value are admitted first, and preempt requests with a higher value if there are no free"
        " blocks or adapter slots. Equal values are served in order of arrival, or by tenant with `fair_tenants`.",
        section="Scheduling",
    )
    cache_salt: str = parameter(
        parsers.string("max_salt_bytes", empty=True),
        "",
        "Name of the tenant. Requests with different salts share no cached blocks. At most 256 bytes"
        " (`limits.max_salt_bytes`).",
    )
    lora_name: str | None = parameter(
        parsers.string("max_adapter_name_bytes", empty=False),
        None,
        "Name of a LoRA adapter. At most 256 bytes (`limits.max_adapter_name_bytes`).",
    )

    prefill_only: bool = parameter(
        parsers.flag,
        False,
        "Compute the prompt, write its full blocks to the remote cache (`remote_cache_url`), and answer without output"
        " once they are written, so that another server can continue from them. `stored_tokens` of the receipt has the"
        " number of tokens that the remote cache has. `max_tokens` is 0. Not in a session, nor with several samples.",
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any], limits: EngineLimits) -> SamplingParams:
        """Build the parameters from JSON values by name.

        Parameters that are not given have the model's defaults; in a beam search, only those that have an effect there.
        Raises RequestError, which names the first parameter that is unknown, has a wrong type or is out of range.
        """
        known = {spec.name: spec.metadata["parse"] for spec in fields(cls)}
        parsed = {}
        for name, value in values.items():
            if name in UNSUPPORTED_PARAMETERS:
                check_parameter(name, value)
            elif name not in known:
                meant = suggestion(name, known) or f"known are {', '.join(known)}"
                raise invalid_argument(name, value, f"unknown sampling parameter; {meant}")
            elif value is not None or name in _NULL_IS_A_VALUE:
                parsed[name] = known[name](name, value, limits)
        if parsed.get("prefill_only"):
            parsed.setdefault("max_tokens", 0)
        searches = parsed.get("beam_width", 1) > 1
        for name, value in limits.sampling_defaults.values.items():
            if cls.__dataclass_fields__[name].metadata["with_beams"] or not searches:
                parsed.setdefault(name, value)
        params = cls(**parsed)
        params._check(limits)
        return params

    def _check(self, limits: EngineLimits) -> None:
        """Raise RequestError for parameters that exclude each other."""
        if self.prefill_only and (self.max_tokens or self.num_seqs > 1):
            problem = "generates nothing; leave out max_tokens, n, best_of and beam_width"
            raise invalid_argument("prefill_only", True, problem)
        if self.max_tokens == 0 and self.prompt_logprobs is None and not (self.echo or self.prefill_only):
            problem = f"must be 1..{limits.max_model_len}, or 0 with prompt_logprobs, echo or prefill_only"
            raise invalid_argument("max_tokens", 0, problem)
        if self.logits_digest and self.max_tokens == 0 and self.prompt_logprobs is None:
            raise invalid_argument(
                "logits_digest", True, "must be false with max_tokens=0 unless prompt_logprobs is given"
            )
        self.check_min_tokens()
        if self.best_of is not None and self.best_of < self.n:
            raise invalid_argument("best_of", self.best_of, f"must be n={self.n}..{limits.max_num_seqs}")
        self._check_structure()
        self._check_thinking()
        self._check_beams()

    def check_min_tokens(self) -> None:
        """Raise RequestError if `min_tokens` is above `max_tokens`."""
        if self.min_tokens > self.max_tokens:
            raise invalid_argument("min_tokens", self.min_tokens, f"must be 0..max_tokens={self.max_tokens}")

    def _check_structure(self) -> None:
        given = self._structures
        if not given:
            return
        if len(given) > 1:
            names = " and ".join(structure.field for structure in given)
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{names}: each sets the form of the output; give one")
        name = given[0].field
        if self.beam_width > 1:
            raise invalid_argument("beam_width", self.beam_width, f"must be 1 with {name}")
        if self.ignore_eos:
            raise invalid_argument("ignore_eos", True, f"must be false with {name}, which needs the end of sequence")

    def _check_thinking(self) -> None:
        if (budget := self.thinking_token_budget) is None:
            return
        if self.structure:
            problem = f"must be null with {self.structure.field}, which sets the form of the whole output"
            raise invalid_argument("thinking_token_budget", budget, problem)
        if self.beam_width > 1:
            raise invalid_argument("thinking_token_budget", budget, f"must be null with beam_width={self.beam_width}")

    def _check_beams(self) -> None:
        """Raise RequestError for parameters without effect: sampling parameters in a beam search, and beam parameters
        outside of one."""
        changed = [spec for spec in fields(self) if getattr(self, spec.name) != spec.default]
        if self.beam_width == 1:
            for spec in changed:
                if spec.name in ("length_penalty", "early_stopping"):
                    raise invalid_argument(spec.name, getattr(self, spec.name), "needs a beam_width above 1")
            return
        if self.selects_best_of:
            raise invalid_argument("best_of", self.best_of, f"must be n={self.n} with beam_width={self.beam_width}")
        if self.n > self.beam_width:
            raise invalid_argument("n", self.n, f"must be 1..beam_width={self.beam_width}")
        for spec in changed:
            is_greedy = spec.name == "temperature" and self.temperature == 0
            if not spec.metadata["with_beams"] and not is_greedy:
                problem = f"has no effect with beam_width={self.beam_width}; leave it out"
                raise invalid_argument(spec.name, getattr(self, spec.name), problem)

    @property
    def structure(self) -> Structure | None:
        """The structure that the output must have. None: no restriction."""
        return next(iter(self._structures), None)

    @property
    def _structures(self) -> list[Structure]:
        return [
            structure for structure in (getattr(self, name) for name in STRUCTURE_PARAMETERS) if structure is not None
        ]

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def num_samples(self) -> int:
        """The number of samples to generate, or of outputs of a beam search."""
        return self.best_of or self.n

    @property
    def selects_best_of(self) -> bool:
        """Whether more samples are generated than returned."""
        return self.num_samples > self.n

    @property
    def num_seqs(self) -> int:
        """The maximum number of sequences that run at the same time."""
        return max(self.num_samples, self.beam_width)


_FIELDS = {spec.name: spec for spec in fields(SamplingParams)}
PARAMETER_NAMES = _FIELDS.keys() | UNSUPPORTED_PARAMETERS.keys()

# Keys of `generation_config.json` that set defaults. The first ones have no effect in transformers if `do_sample` is
# false. MAX_TOKENS is the default of `max_tokens`.
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
MAX_TOKENS = "max_new_tokens"
DEFAULT_KEYS = (*SAMPLING_KEYS, "repetition_penalty", MAX_TOKENS)
_ANY = EngineLimits(UNBOUNDED_MAX_TOKENS, 1, 1, BlockLayout(1), 1)  # the parsers of these keys use no limits
_parse_max_tokens = parsers.integer(1, UNBOUNDED_MAX_TOKENS)


def parse_default(key: str, value: Any) -> Any:
    """Return the parsed value of one of DEFAULT_KEYS. Raises ValueError with what it must be."""
    parse = _parse_max_tokens if key == MAX_TOKENS else _FIELDS[key].metadata["parse"]
    try:
        return parse(key, value, _ANY)
    except RequestError as error:
        raise ValueError(str(error).rpartition(": ")[2]) from None


def default_overrides(value: Any) -> Mapping[str, Any]:
    """Parse the option `override_generation_config`. Raises ValueError with what it must be."""
    if not isinstance(value, Mapping):
        raise ValueError('must be an object like {"temperature": 0.5}')
    for key, default in value.items():
        if key not in DEFAULT_KEYS:
            raise ValueError(f"{key}: unknown; {hint(str(key), DEFAULT_KEYS)}")
        try:
            if default is not None:
                parse_default(key, default)
        except ValueError as error:
            raise ValueError(f"{key}={json.dumps(default, default=str)}: {error}") from None
    return value


def to_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults for checked values by key. Null, and the engine's own default, change nothing."""
    parsed = {key: parse_default(key, value) for key, value in values.items() if value is not None}
    max_tokens = parsed.pop(MAX_TOKENS, None)
    changed = {name: value for name, value in parsed.items() if value != _FIELDS[name].default}
    if max_tokens is not None:
        changed["max_tokens"] = UNBOUNDED_MAX_TOKENS
    return SamplingDefaults(changed, max_tokens)
