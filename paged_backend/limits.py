"""What bounds a request: the model's own limits, and the caps of every list and text that a client may send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
MAX_WORDS_OF_TOKENS = 1024
MAX_WORD_TOKENS = 64  # of one of those
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_LOGIT_BIASES = 1024
MAX_BIASED_WORDS = 128
MAX_SALT_BYTES = 256
MAX_ADAPTER_NAME_BYTES = 256
MAX_LOGPROBS = 20
AS_MANY = 2**31 - 1  # as max_tokens: as many as the model's context and the pool have room for
