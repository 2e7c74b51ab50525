"""A step in flight: the results that a launched step copies to the host, and their conversion to a `StepResult`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import HiddenState
from paged_backend.api.token_outputs import TOKEN_OUTPUTS
from paged_backend.execution.batch import DraftCheck
from paged_backend.sampling.outputs import OutputValues, Source, TopTokens
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.plan import StepResult, accept_draft_tokens

NOT_FINITE = "the model's outputs for this request are not finite; other requests are not affected"


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that was enqueued, with its results on their way to the host."""

    tokens: Tensor  # [num_sampled] int64
    beams: TopTokens | None
    outputs: tuple[OutputValues, ...]  # optional outputs
    checks: tuple[DraftCheck, ...]
    draft_ids: Tensor | None  # [num_tokens] int64: the batch's tokens, if a draft model proposed some of them
    hidden: Tensor | None  # [num_hidden, hidden_size] float32, for embedding requests
    hidden_chunks: tuple[int, ...]  # chunks of the rows of `hidden`
    failed_rows: tuple[tuple[int, str], ...]  # (row, reason) of samples that are not used
    arrived: torch.cuda.Event | None = None  # reached when the results are on the host; None: they are there
    replayed: bool = False  # whether a captured graph ran the forward pass
    hidden_states: Tensor | None = None  # [num_tokens, hidden_size], on the device: output of a stage before the last

    @classmethod
    def of_hidden_states(cls, hidden_states: Tensor) -> LaunchedStep:
        """Return the step of a stage before the last, which samples nothing."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(none, None, (), (), None, None, (), (), hidden_states=hidden_states)

    def to_host(self) -> LaunchedStep:
        """Start copies of the results from a GPU to the host, and return the step with them."""
        step = replace(
            self,
            tokens=self.tokens.to("cpu", non_blocking=True),
            beams=self.beams and self.beams.to_host(),
            outputs=tuple(values.to_host() for values in self.outputs),
            draft_ids=None if self.draft_ids is None else self.draft_ids.to("cpu", non_blocking=True),
            hidden=None if self.hidden is None else self.hidden.to("cpu", non_blocking=True),
            arrived=torch.cuda.Event(),
        )
        assert step.arrived is not None
        step.arrived.record()
        return step

    def on_host(self) -> LaunchedStep:
        """Wait for the device, and return the step without its event."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return replace(self, arrived=None)

    def result(self) -> StepResult:
        """Wait for the step and return its results."""
        if self.arrived is not None:
            self.arrived.synchronize()
        sampled: list[int] = self.tokens.tolist()
        tokens, seq_of_row = self._accepted_tokens(sampled)
        not_finite = (
            [index for index, accepted in enumerate(tokens) if accepted[-1] < 0] if min(sampled, default=0) < 0 else []
        )
        prompt_values = self._prompt_values()
        hidden_states = self._hidden_states()
        prompt_errors = {
            chunk: _not_finite()
            for name, by_chunk in prompt_values.items()
            for chunk, values in by_chunk.items()
            if not all(map(TOKEN_OUTPUTS[name].is_finite, values))
        } | {chunk: _not_finite() for chunk, state in hidden_states.items() if not np.isfinite(state).all()}
        return StepResult(
            tokens=tokens,
            values=self._values(tokens, seq_of_row),
            candidates=self._candidates(self.beams, seq_of_row) if self.beams else {},
            errors={index: _not_finite() for index in not_finite}
            | {seq_of_row[row]: RequestError(ErrorCode.INVALID_ARGUMENT, reason) for row, reason in self.failed_rows},
            prompt_values=prompt_values,
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

    def _values(self, tokens: list[list[int]], seq_of_row: Sequence[int]) -> dict[str, dict[int, list[Any]]]:
        """Return the values of sampled tokens, by output and sequence."""
        by_output: dict[str, dict[int, list[Any]]] = {}
        for output in self.outputs:
            if output.of.source is Source.SAMPLED:
                by_seq = by_output.setdefault(output.of.name, {})
                for row, (value,) in output.by_row():
                    values = by_seq.setdefault(seq_of_row[row], [])
                    if len(values) < len(tokens[seq_of_row[row]]):  # excludes rows after a rejected draft token
                        values.append(value)
        return by_output

    def _candidates(self, beams: TopTokens, seq_of_row: Sequence[int]) -> dict[int, list[Candidate]]:
        """Return the candidates of live beams, with their values, by sequence."""
        num_candidates = beams.tokens.shape[-1]
        values: list[list[dict[str, Any]]] = [[{} for _ in range(num_candidates)] for _ in range(len(beams.rows))]
        for output in self.outputs:
            if output.of.source is Source.BEAMS:
                for beam, by_token in output.by_row():
                    for candidate, value in zip(values[beam], by_token, strict=True):
                        candidate[output.of.name] = value
        columns = zip(beams.rows.tolist(), beams.tokens.tolist(), beams.log_probs.tolist(), values, strict=True)
        return {seq_of_row[row]: list(map(Candidate, *candidates)) for row, *candidates in columns}

    def _prompt_values(self) -> dict[str, dict[int, list[Any]]]:
        """Return the values of scored prompt tokens, by output and chunk."""
        by_output: dict[str, dict[int, list[Any]]] = {}
        for output in self.outputs:
            if output.of.source is Source.PROMPT:
                by_chunk = by_output.setdefault(output.of.name, {})
                for chunk, (value,) in output.by_row():
                    by_chunk.setdefault(chunk, []).append(value)
        return by_output

    def _hidden_states(self) -> dict[int, HiddenState]:
        if self.hidden is None:
            return {}
        rows = (array("f", row.tobytes()) for row in self.hidden.numpy())
        return dict(zip(self.hidden_chunks, rows, strict=True))


def _not_finite() -> RequestError:
    return RequestError(ErrorCode.INTERNAL, NOT_FINITE)
