"""Optional outputs: values that a request can get with each token, computed from the logits at the token's position,
for output tokens and for tokens of the prompt.

A `TokenOutput` declares one. sampling/outputs.py computes it on the device, and server/ writes it into the response.
Everything between them passes the values on by the name of the output, without knowing which there are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from paged_backend.api.sampling_params import SamplingParams

Value = TypeVar("Value")


class TokenOutput(ABC, Generic[Value]):
    """An optional output with one value for each token."""

    name: ClassVar[str]

    @abstractmethod
    def requested(self, returns: frozenset[str], sampling: SamplingParams) -> int | None:
        """Return k if the value of an output token also describes the k most likely tokens (0: only that token); None
        if the output is not requested.

        returns: the output tensors that the client asks for.
        """

    def requested_of_prompt(self, sampling: SamplingParams) -> int | None:
        """Return the same for each token of the prompt but the first. By default there are no such values."""
        return None

    def is_finite(self, value: Value) -> bool:
        """Return whether the value was computed from finite logits. Otherwise the request fails."""
        return True

    def narrowed(self, value: Value, num_top: int) -> Value:
        """Return a value that describes at most `num_top` of the most likely tokens."""
        return value

    def pack(self, values: Sequence[Value]) -> Any:
        """Return values in little memory."""
        return tuple(values)

    def unpack(self, packed: Any) -> list[Value]:
        """Return the values that were packed."""
        return list(packed)

    @abstractmethod
    def write(self, values: Sequence[Value]) -> Any:
        """Return values as JSON."""

    @abstractmethod
    def read(self, written: Any) -> tuple[Value, ...]:
        """Return the values of `write`. Raises TypeError or ValueError."""


class TokenLogprob(NamedTuple):
    """A token in the model's own distribution, before temperature, penalties and filters."""

    token: int
    logprob: float  # natural logarithm
    rank: int  # 1 + the number of tokens with a higher logit


Logprobs = tuple[TokenLogprob, ...]  # the sampled token, then the most likely ones, best first


class _LogprobsOutput(TokenOutput[Logprobs]):
    name = "logprobs"

    def requested(self, returns: frozenset[str], sampling: SamplingParams) -> int | None:
        if "logprobs" in returns and sampling.logprobs is not None:
            return sampling.logprobs
        return 0 if "cumulative_logprob" in returns or sampling.selects_best_of else None

    def requested_of_prompt(self, sampling: SamplingParams) -> int | None:
        return sampling.prompt_logprobs

    def is_finite(self, value: Logprobs) -> bool:
        return math.isfinite(value[0].logprob)

    def narrowed(self, value: Logprobs, num_top: int) -> Logprobs:
        chosen, *others = value
        if len(others) < num_top:
            return value
        best = sorted(value, key=lambda entry: (entry.rank, entry.token))[:num_top]  # of the same rank: by their ids
        return chosen, *(entry for entry in best if entry.token != chosen.token)

    def pack(self, values: Sequence[Logprobs]) -> tuple[array[int], array[int], array[float], array[int]]:
        """Return arrays with 12 bytes for each entry of a token."""
        entries = [entry for value in values for entry in value]
        return (
            array("H", map(len, values)),
            array("i", [entry.token for entry in entries]),
            array("f", [entry.logprob for entry in entries]),  # they were computed in float32
            array("i", [entry.rank for entry in entries]),
        )

    def unpack(self, packed: tuple[array[int], array[int], array[float], array[int]]) -> list[Logprobs]:
        counts, tokens, log_probs, ranks = packed
        entries = map(TokenLogprob, tokens, log_probs, ranks)
        return [tuple(next(entries) for _ in range(count)) for count in counts]

    def write(self, values: Sequence[Logprobs]) -> Any:
        return values

    def read(self, written: Any) -> tuple[Logprobs, ...]:
        return tuple(
            tuple(TokenLogprob(int(token), float(value), int(rank)) for token, value, rank in row) for row in written
        )


FINGERPRINT_BYTES = 16
Fingerprint = bytes  # FINGERPRINT_BYTES long; changes with every bit of the logits of a position


class _FingerprintsOutput(TokenOutput[Fingerprint]):
    name = "fingerprints"

    def requested(self, returns: frozenset[str], sampling: SamplingParams) -> int | None:
        return 0 if sampling.logits_digest else None

    def requested_of_prompt(self, sampling: SamplingParams) -> int | None:
        return 0 if sampling.logits_digest and sampling.prompt_logprobs is not None else None

    def pack(self, values: Sequence[Fingerprint]) -> bytes:
        return b"".join(values)

    def unpack(self, packed: bytes) -> list[Fingerprint]:
        return split_fingerprints(packed)

    def write(self, values: Sequence[Fingerprint]) -> str:
        return b"".join(values).hex()

    def read(self, written: Any) -> tuple[Fingerprint, ...]:
        data = bytes.fromhex(written)
        if len(data) % FINGERPRINT_BYTES:
            raise ValueError(f"{len(data)} bytes of fingerprints")
        return tuple(split_fingerprints(data))


def split_fingerprints(data: bytes) -> list[Fingerprint]:
    """Return the fingerprints that `data` is made of."""
    return [data[start : start + FINGERPRINT_BYTES] for start in range(0, len(data), FINGERPRINT_BYTES)]


LOGPROBS, FINGERPRINTS = _LogprobsOutput(), _FingerprintsOutput()
TOKEN_OUTPUTS: Mapping[str, TokenOutput[Any]] = {output.name: output for output in (LOGPROBS, FINGERPRINTS)}

# How many of the most likely tokens the values of an output describe, by its name.
Requested = Mapping[str, int]
# The values of an output, one for each token, by its name.
Values = Mapping[str, Sequence[Any]]
NOTHING: Mapping[str, Any] = {}


def requested_outputs(returns: Iterable[str], sampling: SamplingParams) -> Requested:
    """Return the outputs that a request gets with each output token. returns: output tensors that the client asks
    for."""
    wanted = frozenset(returns)
    return _without_none({output.name: output.requested(wanted, sampling) for output in TOKEN_OUTPUTS.values()})


def requested_prompt_outputs(sampling: SamplingParams) -> Requested:
    """Return the outputs that a request gets with each token of the prompt but the first."""
    return _without_none({output.name: output.requested_of_prompt(sampling) for output in TOKEN_OUTPUTS.values()})


def _without_none(requested: Mapping[str, int | None]) -> Requested:
    return {name: num_top for name, num_top in requested.items() if num_top is not None}


def write_values(values: Values) -> dict[str, Any]:
    """Return values as JSON."""
    return {name: TOKEN_OUTPUTS[name].write(of_output) for name, of_output in values.items()}


def read_values(written: Mapping[str, Any]) -> Values:
    """Return the values of `write_values`. Raises KeyError, TypeError or ValueError."""
    return {name: TOKEN_OUTPUTS[name].read(of_output) for name, of_output in written.items()}
