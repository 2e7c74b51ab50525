"""What bounds a request: the model's own limits, and the caps of every list and text that a client may send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.api.errors import invalid_argument
from paged_backend.api.options import option, whole


@dataclass(frozen=True)
class EmbeddingSpec:
    """What embeddings a model gives."""

    size: int
    dimensions: Sequence[int] = ()  # to which they may be cut: what the model was trained for (Matryoshka)


def cap(default: int, help: str, low: int = 1) -> Any:
    return option(whole(low, 2**31 - 1), help, default)


@dataclass(frozen=True, kw_only=True)
class InputLimits:
    """The most that clients may send of each kind, and of what is kept for them. All of them are engine options."""

    min_priority: int = option(
        whole(-(2**31), 2**31 - 1),
        "the lowest `priority` that a request may ask for; the lowest goes first, before those of other tenants too, so"
        " with tenants that do not trust each other set 0",
        -(2**31),
    )
    max_logprobs: int = cap(20, "`logprobs` and `prompt_logprobs`, at the most", 0)
    max_stop_strings: int = cap(16, "strings in `stop`")
    max_stop_bytes: int = cap(256, "bytes of one of them")
    max_stop_token_ids: int = cap(256, "ids in `stop_token_ids`")
    max_bad_words: int = cap(128, "strings in `bad_words`")
    max_biased_words: int = cap(128, "words in `word_bias`")
    max_word_bytes: int = cap(256, "bytes of one word in `bad_words` or `word_bias`")
    max_token_words: int = cap(1024, "words in `stop_words_token_ids` or `bad_words_token_ids`")
    max_token_word_ids: int = cap(64, "token ids of one of them")
    max_allowed_token_ids: int = cap(16384, "ids in `allowed_token_ids`")
    max_logit_biases: int = cap(1024, "tokens in `logit_bias`, those of `word_bias` among them")
    max_structure_bytes: int = cap(65536, "bytes of a schema, an expression, a grammar, or a list of choices as JSON")
    max_choices: int = cap(1024, "strings in `choice`")
    max_salt_bytes: int = cap(256, "bytes of `cache_salt`")
    max_adapter_name_bytes: int = cap(256, "bytes of `lora_name`")
    max_request_id_bytes: int = cap(256, "bytes of a request's id")
    max_sequence_id_bytes: int = cap(128, "bytes of `sequence_id`")
    max_json_chars: int = cap(8 << 20, "characters of JSON, of one input, or of the messages of a session")
    max_messages: int = cap(
        2048, "messages of a conversation, a session's earlier ones among them: templates may compare each with each"
    )
    max_tools: int = cap(128, "functions in `tools`")
    max_tools_chars: int = cap(1 << 20, "characters of `tools`, without spaces between")
    max_tool_calls: int = cap(128, "`tool_calls` of one message")
    max_queued_structures: int = cap(
        64, "schemas, expressions and grammars that may wait to be compiled; one more is refused, with `UNAVAILABLE`"
    )
    max_remembered_structures: int = cap(256, "of those that were compiled, the latest asked for, which stay")
    max_remembered_structure_bytes: int = cap(1 << 20, "bytes of their texts together")
    max_frame_bytes: int = cap(
        64 << 20, "bytes of one request or answer between this model and those of tensorrtllm_backend"
    )
    max_local_connections: int = cap(64, "connections of such models, each of which needs one")

    def check(self, option: str, field: str, count: int, unit: str) -> None:
        """Raises RequestError where that is more than the option allows."""
        most = getattr(self, option)
        if count > most:
            raise invalid_argument(field, f"{count} {unit}", f"must be at most {most} {unit} ({option})")


@dataclass(frozen=True)
class EngineLimits:
    """What the loaded model, the pool and the operator allow."""

    max_model_len: int
    vocab_size: int
    num_blocks: int  # in the whole pool
    block_size: int
    max_num_seqs: int
    embedding: EmbeddingSpec | None = None  # None: the model gives none
    input_limits: InputLimits = InputLimits()


UNBOUNDED_MAX_TOKENS = 2**31 - 1  # as max_tokens: as many as the model's context and the pool have room for
