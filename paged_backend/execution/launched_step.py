"""A step in flight: the results that a launched step copies to the host, and how they become a `StepResult`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import HiddenState, Logprobs
from paged_backend.execution.batch import DraftCheck
from paged_backend.sampling.logprobs import LogprobsTensors
from paged_backend.sampling.sampler import TopLogprobs
from paged_backend.scheduling.step_result import StepResult, accept_draft_tokens

NOT_FINITE = "the model's outputs for this request are not finite; other requests are not affected"


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that was enqueued, with its results on their way to the host."""

    tokens: Tensor  # [num_draws] int64
    beams: TopLogprobs | None
    scores: LogprobsTensors | None
    prompts: tuple[LogprobsTensors, ...]  # of scored prompt rows, in order
    prompt_chunks: tuple[tuple[int, int], ...]  # the chunks of those rows, and how many rows of each
    checks: tuple[DraftCheck, ...]
    draft_ids: Tensor | None  # [num_tokens] int64: the batch's tokens, if a draft model proposed some of them
    hidden: Tensor | None  # [num_hidden, hidden_size] float32, of embedding requests
    hidden_chunks: tuple[int, ...]  # the chunks of those rows
    failed_rows: tuple[tuple[int, str], ...]  # samples that are not used, and why
    arrived: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the step and return its results. The only place where the host waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        sampled: list[int] = self.tokens.tolist()
        tokens, draws = self._accepted_tokens(sampled)
        not_finite = (
            [draw for draw, accepted in enumerate(tokens) if accepted[-1] < 0] if min(sampled, default=0) < 0 else []
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
            logprobs=self._logprobs(tokens, draws),
            candidates={draws[row]: candidates for row, candidates in self.beams.by_row()} if self.beams else {},
            errors={draw: _not_finite() for draw in not_finite}
            | {draws[row]: RequestError(ErrorCode.INVALID_ARGUMENT, reason) for row, reason in self.failed_rows},
            prompt_logprobs=prompt_logprobs,
            hidden_states=hidden_states,
            prompt_errors=prompt_errors,
        )

    def _accepted_tokens(self, sampled: list[int]) -> tuple[list[list[int]], Sequence[int]]:
        """Return the tokens of each draw, and the draw of each row. Without draft tokens every row is a draw."""
        if not self.checks:
            return [[token] for token in sampled], range(len(sampled))
        draft_ids = self.draft_ids.tolist() if self.draft_ids is not None else []
        tokens: list[list[int]] = []
        draws: list[int] = []
        for check in (*self.checks, DraftCheck(len(sampled), 0, ())):
            for token in sampled[len(draws) : check.draw]:
                draws.append(len(tokens))
                tokens.append([token])
            if count := len(check.draft_tokens):
                end = check.draw + count + 1
                drafts = draft_ids[check.row : check.row + count] or check.draft_tokens
                draws += [len(tokens)] * (count + 1)
                tokens.append(accept_draft_tokens(sampled[check.draw : end], drafts))
        return tokens, draws

    def _logprobs(self, tokens: list[list[int]], draws: Sequence[int]) -> dict[int, list[Logprobs]]:
        found: dict[int, list[Logprobs]] = {}
        for row, (logprobs,) in self.scores.by_row() if self.scores else ():
            entries = found.setdefault(draws[row], [])
            if len(entries) < len(tokens[draws[row]]):  # rows after a rejected draft token have no token
                entries.append(logprobs)
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
