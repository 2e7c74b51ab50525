"""Limits of a request: limits of the model and the pool, and of every list and text that a client may send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ConfigError, invalid_argument
from paged_backend.api.options import in_bytes, integer, invalid_option, option, parse_fields
from paged_backend.utils.local_socket import DEFAULT_FRAME_BYTES

_PREFIX = "limits."
LIMITS_EXAMPLE = '{"max_tools": 8}'
UNBOUNDED_MAX_TOKENS = 2**31 - 1  # value of max_tokens: as many tokens as fit the context and the pool


@dataclass(frozen=True)
class EmbeddingSpec:
    """The embeddings that a model supports."""

    size: int
    dimensions: Sequence[int] = ()  # sizes to which embeddings may be cut (Matryoshka embeddings)
    keeps_first: bool = False  # whether a truncated prompt keeps its first tokens, as encoders do, or the last ones


@dataclass(frozen=True)
class ClassificationSpec:
    """How a model classifies prompts."""

    labels: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "none"]  # the function that turns scores into probabilities
    weight: np.ndarray = field(repr=False, compare=False)  # [num_labels, hidden_size] float32
    renders_pairs: bool = False  # whether the chat template is made for messages with the roles query and document


def limit(default: int, help: str, low: int = 1) -> Any:
    """Declare a limit as a dataclass field: an integer option of at least `low`."""
    return option(integer(low, 2**31 - 1), help, default)


def byte_limit(default: int, help: str) -> Any:
    """Declare a limit in bytes, whose value may have a unit."""
    return option(in_bytes(integer(1, 2**31 - 1)), help, default)


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """The engine option `limits`: maximum sizes of client input, and of queued and cached input.

    A value above its limit is rejected with an error that names the limit.
    """

    max_prompt_chars: int | None = option(
        integer(1),
        "Characters of a prompt before tokenization. Default: `max_model_len` times the length of the longest token,"
        " which no prompt that fits can exceed.",
        None,
    )
    min_priority: int = option(
        integer(-(2**31), 2**31 - 1),
        "Smallest number that a request may have as `priority`. Smaller numbers are served first, before requests of"
        " all tenants; set 0 if tenants do not trust each other.",
        -(2**31),
    )
    max_logprobs: int = limit(20, "Highest value of `logprobs` and `prompt_logprobs`.", 0)
    max_stop_strings: int = limit(16, "Strings in `stop`.")
    max_stop_bytes: int = byte_limit(256, "Bytes of one string in `stop`.")
    max_stop_token_ids: int = limit(256, "Token ids in `stop_token_ids`.")
    max_bad_words: int = limit(128, "Strings in `bad_words`.")
    max_biased_words: int = limit(128, "Words in `word_bias`.")
    max_word_bytes: int = byte_limit(256, "Bytes of one word in `bad_words` or `word_bias`.")
    max_token_words: int = limit(1024, "Words in `stop_words_token_ids` or `bad_words_token_ids`.")
    max_token_word_ids: int = limit(64, "Token ids of one word in `stop_words_token_ids` or `bad_words_token_ids`.")
    max_allowed_token_ids: int = limit(16384, "Token ids in `allowed_token_ids`.")
    max_logit_biases: int = limit(1024, "Tokens in `logit_bias`, including the tokens of `word_bias`.")
    max_structure_bytes: int = byte_limit(
        65536, "Bytes of a JSON schema, a regular expression, a grammar, or a list of choices written as JSON."
    )
    max_choices: int = limit(1024, "Strings in `choice`.")
    max_salt_bytes: int = byte_limit(256, "Bytes of `cache_salt`.")
    max_adapter_name_bytes: int = byte_limit(256, "Bytes of `lora_name`.")
    max_request_id_bytes: int = byte_limit(256, "Bytes of a request id.")
    max_sequence_id_bytes: int = byte_limit(128, "Bytes of a `sequence_id`.")
    max_json_chars: int = limit(8 << 20, "Characters of one JSON input, and of the messages of one session.")
    max_sampling_chars: int = limit(
        1 << 20,
        "Characters of `sampling_parameters`, which is parsed while other requests wait.",
    )
    max_messages: int = limit(
        2048,
        "Messages of a conversation, including the earlier turns of a session. A chat template may take time quadratic"
        " in this number.",
    )
    max_tools: int = limit(128, "Functions in `tools`.")
    max_tools_chars: int = limit(1 << 20, "Characters of `tools`, and of `chat_template_kwargs`, written as JSON.")
    max_tool_calls: int = limit(128, "`tool_calls` of one message.")
    max_queued_structures: int = limit(
        64,
        "Schemas, expressions and grammars that may wait for compilation. Further ones are rejected with"
        " `UNAVAILABLE`.",
    )
    max_remembered_structures: int = limit(256, "Compiled schemas, expressions and grammars in the cache (LRU).")
    max_remembered_structure_bytes: int = byte_limit(1 << 20, "Bytes of the source texts of all cached structures.")
    max_frame_bytes: int = byte_limit(
        DEFAULT_FRAME_BYTES,
        "Bytes of one request or response between the TensorRT-LLM-compatible models and the engine.",
    )
    max_local_connections: int = limit(
        64, "Connections from TensorRT-LLM-compatible models to the engine; each model needs one."
    )

    def __post_init__(self) -> None:
        parse_fields(self)

    def check(self, name: str, field: str, count: int, unit: str) -> None:
        """Raise RequestError if `count` is above the limit `name`. `field` is the request's field."""
        most = getattr(self, name)
        if count > most:
            raise invalid_argument(field, f"{count} {unit}", f"must be at most {most} {unit} ({name})")


LIMIT_NAMES = tuple(spec.name for spec in fields(InputLimits))


def nest_limits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Collect all spellings of limits in one entry `limits`.

    A limit may be spelled `{"limits": {"max_tools": 8}}`, `{"limits.max_tools": 8}` (for a command line) or
    `{"max_tools": 8}`. Raises ConfigError if `limits` is not an object, or if two spellings set the same limit.
    """
    others: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    spellings: dict[str, str] = {}
    for key, value in options.items():
        if key != "limits" and key not in LIMIT_NAMES and not key.startswith(_PREFIX):
            others[key] = value
            continue
        for name, spelling, limit in _limits_of(key, value):
            if name in limits:
                raise ConfigError(f"{spellings[name]} and {spelling}: both set the same limit; give one of them")
            limits[name], spellings[name] = limit, spelling
    return others | ({"limits": limits} if limits else {})


def _limits_of(key: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield name, spelling and value of each limit that an option sets."""
    if key != "limits":
        yield key.removeprefix(_PREFIX), key, value
    elif isinstance(value, Mapping):
        yield from ((name, f"{_PREFIX}{name}", limit) for name, limit in value.items())
    elif value is not None:
        raise invalid_option(key, value, f"must be an object like {LIMITS_EXAMPLE}")


def merge_options(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `overrides`. Limits are merged one by one, in any spelling."""
    below, above = nest_limits(base), nest_limits(overrides)
    limits = {**below.get("limits", {}), **above.get("limits", {})}
    return {**below, **above, **({"limits": limits} if limits else {})}


@dataclass(frozen=True)
class SamplingDefaults:
    """The model's own defaults of sampling parameters, which replace the defaults in SamplingParams."""

    values: Mapping[str, Any] = field(default_factory=dict)  # by name, parsed
    # The default of `max_tokens`, whose entry in `values` is UNBOUNDED_MAX_TOKENS: `fit_max_tokens` applies it, because
    # the context and the KV cache may have room for fewer tokens.
    max_tokens: int | None = None


@dataclass(frozen=True)
class EngineLimits:
    """The limits set by the loaded model, the block pool and the operator, and the model's sampling defaults."""

    max_model_len: int
    vocab_size: int
    num_pages: int  # pages of the pool; they are blocks, unless the layout divides a block into several
    layout: BlockLayout
    max_num_seqs: int
    embedding: EmbeddingSpec | None = None  # None: the model has no embeddings
    classification: ClassificationSpec | None = None  # None: the model does not classify
    generates: bool = True  # False: the model only classifies or embeds
    input_limits: InputLimits = InputLimits()
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @property
    def block_size(self) -> int:
        return self.layout.block_size
