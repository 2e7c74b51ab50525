"""Requests that compute something from the last hidden state of a prompt instead of generating text.

embedding_request       a vector, like vLLM's pooling of a causal model: the last token's hidden state is truncated to
                        `dimensions`, then normalized to length 1
classification_request  the probabilities of labels, or a score: the same as `AutoModelForSequenceClassification` of
                        transformers computes, with the activation of vLLM's `/classify`
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from paged_backend.api.errors import SEVERAL_LABELS, ErrorCode, RequestError, invalid_argument, is_utf8_text
from paged_backend.api.limits import ClassificationSpec, EmbeddingSpec, EngineLimits, InputLimits
from paged_backend.api.request import HiddenState
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.text.conversation import check_messages

# Sampling parameters that have an effect although no token is sampled.
_SAMPLING = ("priority", "cache_salt", "lora_name", "timeout_ms", "truncate_prompt_tokens", "add_special_tokens")


@dataclass(frozen=True)
class PoolingCall(ABC):
    """A parsed embedding or classification request."""

    field: ClassVar[str]  # the input tensor that the request came in
    operation: ClassVar[str]  # its name in traces

    input: str | list[Any] | None  # the prompt as text or token ids; None: it is `messages`
    messages: list[dict[str, Any]] | None = None  # the prompt as a conversation for the model's chat template

    @property
    def text(self) -> str | None:
        """The prompt; None if it is not text."""
        return self.input if isinstance(self.input, str) else None

    @property
    def ids(self) -> np.ndarray | None:
        """The prompt's token ids, [num_tokens] int32; None if it is not token ids."""
        return np.array(self.input, np.int32) if isinstance(self.input, list) else None

    @classmethod
    @abstractmethod
    def parse(cls, values: Any, limits: InputLimits) -> PoolingCall:
        """Check the structure of the request. The elements of lists are checked by `checked`."""

    @abstractmethod
    def checked(self, limits: EngineLimits) -> PoolingCall:
        """Return the request after checking it against the model. Raises RequestError for what the model cannot do."""

    @abstractmethod
    def answer(self, hidden: HiddenState) -> str:
        """Return the output as JSON. Raises ValueError if the hidden state has none."""

    def check_ids(self, limits: EngineLimits) -> None:
        """Raise RequestError for an element of a list that is not a token id."""
        for index, token in enumerate(self.input if isinstance(self.input, list) else ()):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
                reason = f"must be a token id, 0..{limits.vocab_size - 1}; send one prompt per request"
                raise invalid_argument(f"{self.field}.input[{index}]", token, reason)


def parse_pooling_sampling(field: str, values: Mapping[str, Any], limits: EngineLimits) -> SamplingParams:
    """Return the sampling parameters of the request in `field`. Raises RequestError for one that has no effect."""
    for name in values:
        if name not in _SAMPLING and values[name] is not None:
            raise invalid_argument(name, values[name], f"has no effect with {field}; leave it out")
    given = SamplingParams.parse(values, limits)
    kept = {name: getattr(given, name) for name in _SAMPLING}
    return SamplingParams(max_tokens=0, temperature=0.0, **kept)


def reject_unknown(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise RequestError for a key that is not in `known`."""
    for name in values:
        if name not in known:
            raise invalid_argument(f"{where}.{name}", values[name], f"unknown; known are {', '.join(known)}")


def check_input(field: str, value: Any) -> str | list[Any]:
    """Return the prompt, text or a list. Raises RequestError for anything else. `PoolingCall.check_ids` checks the
    list."""
    if not (isinstance(value, list) or is_utf8_text(value)) or not value:
        raise invalid_argument(field, value, "must be a valid Unicode string or a list of token ids, not empty")
    return value


def pooling_params(field: str, values: Mapping[str, Any], known: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the object `pooling_params` of the request in `field`. Raises RequestError for an unknown key in it."""
    params = values.get("pooling_params")
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise invalid_argument(f"{field}.pooling_params", params, "must be a JSON object")
    reject_unknown(f"{field}.pooling_params", params, known)
    return params


EMBEDDING = "embedding_request"
DIMENSIONS = f"{EMBEDDING}.pooling_params.dimensions"


@dataclass(frozen=True)
class EmbeddingCall(PoolingCall):
    """The content of an embedding_request."""

    field = EMBEDDING
    operation = "embeddings"

    dimensions: Any = None  # length to truncate the embedding to

    @classmethod
    def parse(cls, values: Any, limits: InputLimits) -> EmbeddingCall:
        if not isinstance(values, dict):
            raise invalid_argument(EMBEDDING, values, 'must be a JSON object like {"input": "…"}')
        reject_unknown(EMBEDDING, values, ("input", "pooling_params"))
        prompt = check_input(f"{EMBEDDING}.input", values.get("input"))
        return cls(prompt, dimensions=pooling_params(EMBEDDING, values, ("dimensions",)).get("dimensions"))

    def checked(self, limits: EngineLimits) -> EmbeddingCall:
        """Return the call with `dimensions` as a number or None. Raises RequestError for what the model cannot do."""
        if limits.embedding is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{EMBEDDING}: this model gives no embeddings")
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


CLASSIFICATION = "classification_request"
_CLASSIFICATION_KEYS = ("input", "messages", "query", "document", "pooling_params")
_FORMS = "give exactly one of input, messages, or query with document"


@dataclass(frozen=True)
class ClassificationCall(PoolingCall):
    """The content of a classification_request. A query and a document are two messages."""

    field = CLASSIFICATION
    operation = "classification"

    use_activation: bool = True
    spec: ClassificationSpec | None = None  # set by `checked`

    @classmethod
    def parse(cls, values: Any, limits: InputLimits) -> ClassificationCall:
        if not isinstance(values, dict):
            raise invalid_argument(CLASSIFICATION, values, 'must be a JSON object like {"input": "…"}')
        reject_unknown(CLASSIFICATION, values, _CLASSIFICATION_KEYS)
        use_activation = pooling_params(CLASSIFICATION, values, ("use_activation",)).get("use_activation")
        if not isinstance(use_activation, bool | None):
            where = f"{CLASSIFICATION}.pooling_params.use_activation"
            raise invalid_argument(where, use_activation, "must be true or false")
        given = [name for name in _CLASSIFICATION_KEYS[:-1] if values.get(name) is not None]
        if given not in (["input"], ["messages"], ["query", "document"]):
            names = f"{' and '.join(given)} are given" if given else "none is given"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{CLASSIFICATION}: {names}; {_FORMS}")
        activated = use_activation is not False
        if given == ["input"]:
            return cls(check_input(f"{CLASSIFICATION}.input", values["input"]), None, activated)
        if given == ["messages"]:
            return cls(None, check_messages(values["messages"], limits), activated)
        for name in given:
            if not is_utf8_text(values[name]) or not values[name]:
                reason = "must be a valid Unicode string, not empty"
                raise invalid_argument(f"{CLASSIFICATION}.{name}", values[name], reason)
        return cls(None, [{"role": name, "content": values[name]} for name in given], activated)

    def checked(self, limits: EngineLimits) -> ClassificationCall:
        spec = limits.classification
        if spec is None:
            reason = "this model does not classify: its files have no head for it, and classifier_from_token is not set"
            raise RequestError(ErrorCode.INVALID_ARGUMENT, f"{CLASSIFICATION}: {reason}")
        if self.messages and self.messages[0]["role"] == "query" and not spec.renders_pairs:
            reason = "needs the engine option chat_template, which says how the model reads a query and a document"
            if len(spec.labels) > 1:
                reason = f"the model has {len(spec.labels)} {SEVERAL_LABELS}; classifying a pair {reason}"
            raise invalid_argument(f"{CLASSIFICATION}.query", self.messages[0]["content"], reason)
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
