"""Requests that compute something from the last hidden state of a prompt instead of generating text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paged_backend.api.errors import invalid_argument, is_utf8_text
from paged_backend.api.limits import EngineLimits, InputLimits
from paged_backend.api.request import HiddenState
from paged_backend.api.sampling_params import SamplingParams

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
    found = values.get("pooling_params")
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise invalid_argument(f"{field}.pooling_params", found, "must be a JSON object")
    reject_unknown(f"{field}.pooling_params", found, known)
    return found
