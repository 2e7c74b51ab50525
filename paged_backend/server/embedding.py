"""Embedding requests: from a prompt's last hidden state to a vector, like vLLM's pooling of a causal model.

The last token's hidden state is truncated to `dimensions`, then normalized to length 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument, is_utf8_text
from paged_backend.api.limits import EmbeddingSpec, EngineLimits
from paged_backend.api.request import HiddenState
from paged_backend.api.sampling_params import SamplingParams

INPUT, DIMENSIONS = "embedding_request.input", "embedding_request.pooling_params.dimensions"
# Sampling parameters that have an effect although no token is sampled.
_SAMPLING = ("priority", "cache_salt", "lora_name", "timeout_ms", "truncate_prompt_tokens", "add_special_tokens")


@dataclass(frozen=True)
class EmbeddingCall:
    """The content of an embedding_request."""

    input: str | list[Any]  # text or token ids
    dimensions: Any = None  # length to truncate the embedding to

    @classmethod
    def parse(cls, values: Any) -> EmbeddingCall:
        """Check the structure of the request. The elements of lists are checked by `checked`."""
        if not isinstance(values, dict):
            raise invalid_argument("embedding_request", values, 'must be a JSON object like {"input": "…"}')
        _reject_unknown("embedding_request", values, ("input", "pooling_params"))
        text = values.get("input")
        if not (isinstance(text, list) or is_utf8_text(text)) or not text:
            raise invalid_argument(INPUT, text, "must be a valid Unicode string or a list of token ids, not empty")
        pooling = values.get("pooling_params")
        pooling = {} if pooling is None else pooling
        if not isinstance(pooling, dict):
            raise invalid_argument("embedding_request.pooling_params", pooling, "must be a JSON object")
        _reject_unknown("embedding_request.pooling_params", pooling, ("dimensions",))
        return cls(text, pooling.get("dimensions"))

    @property
    def text(self) -> str | None:
        """The prompt; None if it is token ids."""
        return self.input if isinstance(self.input, str) else None

    @property
    def ids(self) -> np.ndarray | None:
        """The prompt's token ids, [num_tokens] int32; None if it is text."""
        return np.array(self.input, np.int32) if isinstance(self.input, list) else None

    def checked(self, limits: EngineLimits) -> EmbeddingCall:
        """Return the call with `dimensions` as a number or None. Raises RequestError for what the model cannot do."""
        if limits.embedding is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "embedding_request: this model gives no embeddings")
        if isinstance(self.input, list):
            _check_ids(self.input, limits)
        return replace(self, dimensions=_pick_dimensions(self.dimensions, limits.embedding))


def parse_embedding_sampling(values: Mapping[str, Any], limits: EngineLimits) -> SamplingParams:
    """Return the sampling parameters of an embedding_request. Raises RequestError for one that has no effect."""
    for name in values:
        if name not in _SAMPLING and values[name] is not None:
            raise invalid_argument(name, values[name], "has no effect with embedding_request; leave it out")
    given = SamplingParams.parse(values, limits)
    kept = {name: getattr(given, name) for name in _SAMPLING}
    return SamplingParams(max_tokens=0, temperature=0.0, **kept)


def embedding_json(hidden: HiddenState, dimensions: int | None) -> str:
    """Return the embedding as a JSON list of numbers. Raises ValueError if the hidden state cannot be normalized."""
    vector = np.frombuffer(hidden, np.float32)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not 0 < length < float("inf"):
        raise ValueError(f"the hidden state has the length {length}, so no embedding can be made of it")
    return json.dumps((vector / length).astype(np.float32).tolist())


def _reject_unknown(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise invalid_argument(f"{where}.{name}", values[name], f"unknown; known are {', '.join(known)}")


def _check_ids(ids: list[Any], limits: EngineLimits) -> None:
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            reason = f"must be a token id, 0..{limits.vocab_size - 1}; send one prompt per request"
            raise invalid_argument(f"{INPUT}[{index}]", token, reason)


def _pick_dimensions(value: Any, spec: EmbeddingSpec) -> int | None:
    """Check `dimensions`, which clients of Triton's vLLM backend send as a list of one number."""
    wanted = value[0] if isinstance(value, list) and len(value) == 1 else value
    if wanted is None:
        return None
    if not spec.dimensions:
        reason = f"leave it out: this model was not trained for fewer than its {spec.size} (is_matryoshka)"
        raise invalid_argument(DIMENSIONS, value, reason)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted not in spec.dimensions:
        allowed = spec.dimensions
        shown = f"1..{spec.size}" if isinstance(allowed, range) else f"one of {', '.join(map(str, allowed))}"
        raise invalid_argument(DIMENSIONS, value, f"must be {shown}")
    return wanted
