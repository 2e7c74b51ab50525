"""Classification requests: from a prompt's last hidden state to the probabilities of labels, or to a score.

The same as `AutoModelForSequenceClassification` of transformers computes, with the activation of vLLM's `/classify`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_backend.api.errors import SEVERAL_LABELS, ErrorCode, RequestError, invalid_argument, is_utf8_text
from paged_backend.api.limits import ClassificationSpec, EngineLimits, InputLimits
from paged_backend.api.request import HiddenState
from paged_backend.server.pooling import PoolingCall, check_input, pooling_params, reject_unknown
from paged_backend.text.conversation import check_messages

FIELD = "classification_request"
_KEYS = ("input", "messages", "query", "document", "pooling_params")
_FORMS = "give exactly one of input, messages, or query with document"


@dataclass(frozen=True)
class ClassificationCall(PoolingCall):
    """The content of a classification_request. A query and a document are two messages."""

    field = FIELD
    operation = "classification"

    use_activation: bool = True
    spec: ClassificationSpec | None = None  # set by `checked`

    @classmethod
    def parse(cls, values: Any, limits: InputLimits) -> ClassificationCall:
        if not isinstance(values, dict):
            raise invalid_argument(FIELD, values, 'must be a JSON object like {"input": "…"}')
        reject_unknown(FIELD, values, _KEYS)
        use_activation = pooling_params(FIELD, values, ("use_activation",)).get("use_activation")
        if not isinstance(use_activation, bool | None):
            raise invalid_argument(f"{FIELD}.pooling_params.use_activation", use_activation, "must be true or false")
        given = [name for name in _KEYS[:-1] if values.get(name) is not None]
        if given not in (["input"], ["messages"], ["query", "document"]):
            names = f"{' and '.join(given)} are given" if given else "none is given"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{FIELD}: {names}; {_FORMS}")
        activated = use_activation is not False
        if given == ["input"]:
            return cls(check_input(f"{FIELD}.input", values["input"]), None, activated)
        if given == ["messages"]:
            return cls(None, check_messages(values["messages"], limits), activated)
        for name in given:
            if not is_utf8_text(values[name]) or not values[name]:
                raise invalid_argument(f"{FIELD}.{name}", values[name], "must be a valid Unicode string, not empty")
        return cls(None, [{"role": name, "content": values[name]} for name in given], activated)

    def checked(self, limits: EngineLimits) -> ClassificationCall:
        spec = limits.classification
        if spec is None:
            reason = "this model does not classify: its files have no head for it, and classifier_from_token is not set"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{FIELD}: {reason}")
        if self.messages and self.messages[0]["role"] == "query" and not spec.renders_pairs:
            reason = "needs the engine option chat_template, which says how the model reads a query and a document"
            if len(spec.labels) > 1:
                reason = f"the model has {len(spec.labels)} {SEVERAL_LABELS}; classifying a pair {reason}"
            raise invalid_argument(f"{FIELD}.query", self.messages[0]["content"], reason)
        self.check_ids(limits)
        return replace(self, spec=spec)

    def answer(self, hidden: HiddenState) -> str:
        """Return the JSON object with the most likely `label` and the `probs` of all labels."""
        assert self.spec
        state = np.frombuffer(hidden, np.float32)
        logits = self.spec.weight @ state if np.isfinite(state).all() else state
        if not np.isfinite(logits).all():
            raise ValueError("the model's scores are not finite")
        values = _activated(logits.astype(np.float64), self.spec.activation) if self.use_activation else logits
        label = self.spec.labels[int(np.argmax(values))]
        return json.dumps({"label": label, "probs": values.astype(np.float32).tolist()})


def _activated(logits: np.ndarray, activation: str) -> np.ndarray:
    if activation == "softmax":
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()
    if activation == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -logits))
    return logits
