"""Embedding requests: from a prompt's last hidden state to a vector, like vLLM's pooling of a causal model.

The last token's hidden state is truncated to `dimensions`, then normalized to length 1.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_backend.api.errors import ErrorCode, RequestError, invalid_argument
from paged_backend.api.limits import EmbeddingSpec, EngineLimits, InputLimits
from paged_backend.api.request import HiddenState
from paged_backend.server.pooling import PoolingCall, check_input, pooling_params, reject_unknown

FIELD = "embedding_request"
INPUT, DIMENSIONS = f"{FIELD}.input", f"{FIELD}.pooling_params.dimensions"


@dataclass(frozen=True)
class EmbeddingCall(PoolingCall):
    """The content of an embedding_request."""

    field = FIELD
    operation = "embeddings"

    dimensions: Any = None  # length to truncate the embedding to

    @classmethod
    def parse(cls, values: Any, limits: InputLimits) -> EmbeddingCall:
        if not isinstance(values, dict):
            raise invalid_argument(FIELD, values, 'must be a JSON object like {"input": "…"}')
        reject_unknown(FIELD, values, ("input", "pooling_params"))
        prompt = check_input(INPUT, values.get("input"))
        return cls(prompt, dimensions=pooling_params(FIELD, values, ("dimensions",)).get("dimensions"))

    def checked(self, limits: EngineLimits) -> EmbeddingCall:
        """Return the call with `dimensions` as a number or None. Raises RequestError for what the model cannot do."""
        if limits.embedding is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{FIELD}: this model gives no embeddings")
        self.check_ids(limits)
        return replace(self, dimensions=_pick_dimensions(self.dimensions, limits.embedding))

    def answer(self, hidden: HiddenState) -> str:
        """Return the embedding as a JSON list of numbers. Raises ValueError if the hidden state cannot be
        normalized."""
        vector = np.frombuffer(hidden, np.float32)[: self.dimensions].astype(np.float64)
        length = float(np.linalg.norm(vector))
        if not 0 < length < float("inf"):
            raise ValueError(f"the hidden state has the length {length}, so no embedding can be made of it")
        return json.dumps((vector / length).astype(np.float32).tolist())


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
