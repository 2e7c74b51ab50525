"""The results of one step, as the runner hands them to the scheduler. Integers and floats only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paged_backend.api.errors import RequestError
from paged_backend.api.request import Fingerprint, HiddenState, Logprobs
from paged_backend.scheduling.beam_search import Candidate


@dataclass(frozen=True)
class StepResult:
    """The results of a step, by sampled sequence or by chunk.

    Sampled sequences are those in `Chunk.sampled_sequences`, numbered from 0 over all chunks in the plan's order. A
    sequence or chunk without a value is missing from the mapping.
    """

    tokens: Sequence[list[int]]  # per sequence: the sampled token; or accepted draft tokens, then the bonus token
    logprobs: Mapping[int, list[Logprobs]] = field(default_factory=dict)  # by sequence: one entry per token
    candidates: Mapping[int, list[Candidate]] = field(default_factory=dict)  # by sequence, for live beams
    errors: Mapping[int, RequestError] = field(default_factory=dict)  # by sequence: why it has no token
    prompt_logprobs: Mapping[int, list[Logprobs]] = field(default_factory=dict)  # by chunk: one per scored position
    fingerprints: Mapping[int, list[Fingerprint]] = field(default_factory=dict)  # by sequence: one per token
    prompt_fingerprints: Mapping[int, list[Fingerprint]] = field(default_factory=dict)  # by chunk, as `prompt_logprobs`
    hidden_states: Mapping[int, HiddenState] = field(default_factory=dict)  # by chunk, for embedding requests
    prompt_errors: Mapping[int, RequestError] = field(default_factory=dict)  # by chunk: why one of the two is missing

    @classmethod
    def of_tokens(cls, tokens: Iterable[int]) -> StepResult:
        """Return a result with one sampled token for each sampled sequence and nothing else."""
        return cls([[token] for token in tokens])


def accept_draft_tokens(sampled: Sequence[int], draft_tokens: Sequence[int]) -> list[int]:
    """Return the tokens that verification accepts: `sampled` up to and including the first that differs from its draft.

    sampled: the token sampled before each draft token, and the one after the last (the bonus token).
    """
    accepted = 0
    while accepted < len(draft_tokens) and sampled[accepted] == draft_tokens[accepted]:
        accepted += 1
    return list(sampled[: accepted + 1])
