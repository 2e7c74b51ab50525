"""From a prompt's last hidden state to an embedding, as vLLM makes it of a causal model: cut, then of length 1."""

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
# What of the sampling parameters has a meaning without a draw.
_SAMPLING = ("priority", "cache_salt", "lora_name", "timeout_ms", "truncate_prompt_tokens", "add_special_tokens")


@dataclass(frozen=True)
class EmbeddingCall:
    """What is to be embedded, as it was sent."""

    input: str | list[Any]  # text or token ids
    dimensions: Any = None  # to which the embedding is to be cut

    @classmethod
    def parse(cls, values: Any) -> EmbeddingCall:
        """Raises RequestError for what does not have the shape of a request. What lists hold is left to `checked`."""
        if not isinstance(values, dict):
            raise invalid_argument("embedding_request", values, 'must be a JSON object like {"input": "…"}')
        _refuse_others("embedding_request", values, ("input", "pooling_params"))
        text = values.get("input")
        if not (isinstance(text, list) or is_utf8_text(text)) or not text:
            raise invalid_argument(
                INPUT, text, "must be a string of whole characters or a list of token ids, not empty"
            )
        pooling = values.get("pooling_params")
        pooling = {} if pooling is None else pooling
        if not isinstance(pooling, dict):
            raise invalid_argument("embedding_request.pooling_params", pooling, "must be a JSON object")
        _refuse_others("embedding_request.pooling_params", pooling, ("dimensions",))
        return cls(text, pooling.get("dimensions"))

    @property
    def text(self) -> str | None:
        return self.input if isinstance(self.input, str) else None

    @property
    def ids(self) -> np.ndarray | None:  # [num_tokens] int32
        return np.array(self.input, np.int32) if isinstance(self.input, list) else None

    def checked(self, limits: EngineLimits) -> EmbeddingCall:
        """The same, its dimensions a number or None. Raises RequestError for what the model cannot do."""
        if limits.embedding is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "embedding_request: this model gives no embeddings")
        if isinstance(self.input, list):
            _check_ids(self.input, limits)
        return replace(self, dimensions=_pick_dimensions(self.dimensions, limits.embedding))


def parse_embedding_sampling(values: Mapping[str, Any], limits: EngineLimits) -> SamplingParams:
    """Raises RequestError for what would have no effect."""
    for name in values:
        if name not in _SAMPLING and values[name] is not None:
            raise invalid_argument(name, values[name], "has no effect with embedding_request; leave it out")
    given = SamplingParams.parse(values, limits)
    kept = {name: getattr(given, name) for name in _SAMPLING}
    return SamplingParams(max_tokens=0, temperature=0.0, **kept)


def embedding_json(hidden: HiddenState, dimensions: int | None) -> str:
    """A JSON list of numbers. Raises ValueError where the model gave none that have a direction."""
    vector = np.frombuffer(hidden, np.float32)[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if not 0 < length < float("inf"):
        raise ValueError(f"the hidden state has the length {length}, which no embedding can be made of")
    return json.dumps((vector / length).astype(np.float32).tolist())


def _refuse_others(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            raise invalid_argument(f"{where}.{name}", values[name], f"unknown; known are {', '.join(known)}")


def _check_ids(ids: list[Any], limits: EngineLimits) -> None:
    for index, one in enumerate(ids):
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < limits.vocab_size:
            reason = f"must be a token id, 0..{limits.vocab_size - 1}; give one prompt a request"
            raise invalid_argument(f"{INPUT}[{index}]", one, reason)


def _pick_dimensions(value: Any, spec: EmbeddingSpec) -> int | None:
    """A list of one is what clients of Triton's vLLM backend send."""
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
