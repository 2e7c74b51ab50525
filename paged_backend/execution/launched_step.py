"""A step in flight: the results that a launched step copies to the host, and their conversion to a `StepResult`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Fingerprint, HiddenState, Logprobs
from paged_backend.execution.batch import DraftCheck
from paged_backend.sampling.fingerprints import FingerprintTensors
from paged_backend.sampling.logprobs import LogprobsTensors
from paged_backend.sampling.sampler import TopLogprobs
from paged_backend.scheduling.plan import StepResult, accept_draft_tokens

NOT_FINITE = "the model's outputs for this request are not finite; other requests are not affected"


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that was enqueued, with its results on their way to the host."""

    tokens: Tensor  # [num_sampled] int64
    beams: TopLogprobs | None
    scores: LogprobsTensors | None
    prompts: tuple[LogprobsTensors, ...]  # log probabilities of scored prompt rows, in order
    prompt_chunks: tuple[tuple[int, int], ...]  # (chunk, number of rows) of `prompts`
    checks: tuple[DraftCheck, ...]
    draft_ids: Tensor | None  # [num_tokens] int64: the batch's tokens, if a draft model proposed some of them
    hidden: Tensor | None  # [num_hidden, hidden_size] float32, for embedding requests
    hidden_chunks: tuple[int, ...]  # chunks of the rows of `hidden`
    failed_rows: tuple[tuple[int, str], ...]  # (row, reason) of samples that are not used
    arrived: torch.cuda.Event | None
    replayed: bool = False  # whether a captured graph ran the forward pass
    states: Tensor | None = None  # [num_tokens, hidden_size], on the device: of a stage before the last
    fingerprints: FingerprintTensors | None = None  # for requests with a digest

    @classmethod
    def of_states(cls, states: Tensor) -> LaunchedStep:
        """Return the step of a stage before the last, which samples nothing."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, None, None, (), (), (), None, None, (), (), None, states=states)

    def on_host(self) -> LaunchedStep:
        """Wait for the device, and return the step without what belongs to it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return replace(self, arrived=None)

    def result(self) -> StepResult:
        """Wait for the step and return its results. The only place where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        sampled: list[int] = self.tokens.tolist()
        tokens, seq_of_row = self._accepted_tokens(sampled)
        not_finite = (
            [index for index, accepted in enumerate(tokens) if accepted[-1] < 0] if min(sampled, default=0) < 0 else []
        )
        prompt_logprobs = self._prompt_logprobs()
        hidden_states = self._hidden_states()
        prompt_errors = {
            chunk: _not_finite()
            for chunk, rows in prompt_logprobs.items()
            if not all(math.isfinite(row[0].logprob) for row in rows)
        } | {chunk: _not_finite() for chunk, state in hidden_states.items() if not np.isfinite(state).all()}
        return StepResult(
            tokens=tokens,
            logprobs=self._logprobs(tokens, seq_of_row),
            candidates={seq_of_row[row]: candidates for row, candidates in self.beams.by_row()} if self.beams else {},
            errors={index: _not_finite() for index in not_finite}
            | {seq_of_row[row]: RequestError(ErrorCode.INVALID_ARGUMENT, reason) for row, reason in self.failed_rows},
            prompt_logprobs=prompt_logprobs,
            fingerprints=self._fingerprints(tokens, seq_of_row) if self.fingerprints else {},
            prompt_fingerprints=dict(self.fingerprints.by_chunk()) if self.fingerprints else {},
            hidden_states=hidden_states,
            prompt_errors=prompt_errors,
        )

    def _accepted_tokens(self, sampled: list[int]) -> tuple[list[list[int]], Sequence[int]]:
        """Return the tokens of each sampled sequence, and the sequence index of each row. Without draft tokens each
        sequence has one row."""
        if not self.checks:
            return [[token] for token in sampled], range(len(sampled))
        draft_ids = self.draft_ids.tolist() if self.draft_ids is not None else []
        tokens: list[list[int]] = []
        seq_of_row: list[int] = []
        for check in (*self.checks, DraftCheck(len(sampled), 0, ())):
            for token in sampled[len(seq_of_row) : check.first_sample]:
                seq_of_row.append(len(tokens))
                tokens.append([token])
            if count := len(check.draft_tokens):
                end = check.first_sample + count + 1
                drafts = draft_ids[check.row : check.row + count] or check.draft_tokens
                seq_of_row += [len(tokens)] * (count + 1)
                tokens.append(accept_draft_tokens(sampled[check.first_sample : end], drafts))
        return tokens, seq_of_row

    def _logprobs(self, tokens: list[list[int]], seq_of_row: Sequence[int]) -> dict[int, list[Logprobs]]:
        found: dict[int, list[Logprobs]] = {}
        for row, (logprobs,) in self.scores.by_row() if self.scores else ():
            entries = found.setdefault(seq_of_row[row], [])
            if len(entries) < len(tokens[seq_of_row[row]]):  # excludes rows after a rejected draft token
                entries.append(logprobs)
        return found

    def _fingerprints(self, tokens: list[list[int]], seq_of_row: Sequence[int]) -> dict[int, list[Fingerprint]]:
        assert self.fingerprints
        found: dict[int, list[Fingerprint]] = {}
        for row, value in self.fingerprints.by_sample():
            values = found.setdefault(seq_of_row[row], [])
            if len(values) < len(tokens[seq_of_row[row]]):  # excludes rows after a rejected draft token
                values.append(value)
        return found

    def _prompt_logprobs(self) -> dict[int, list[Logprobs]]:
        rows = (logprobs for part in self.prompts for _, (logprobs,) in part.by_row())
        return {chunk: list(islice(rows, count)) for chunk, count in self.prompt_chunks}

    def _hidden_states(self) -> dict[int, HiddenState]:
        if self.hidden is None:
            return {}
        states = (array("f", row.tobytes()) for row in self.hidden.numpy())
        return dict(zip(self.hidden_chunks, states, strict=True))


def _not_finite() -> RequestError:
    return RequestError(ErrorCode.INTERNAL, NOT_FINITE)
