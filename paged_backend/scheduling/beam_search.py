"""Beam search: which beams continue, by the rules of transformers' `generate(num_beams=...)`. Tokens and scores only.

    live          the beam_width most likely outputs that may continue; each step extends them all
    hypotheses    the best outputs that ended, scored by log-probability / length ** length_penalty

A step examines the (1 + number of stop tokens) * beam_width most likely continuations of all live beams. Those that end
an output become hypotheses if they are among the first beam_width. The best beam_width of the rest stay live. A stop
string, or a stop sequence of several tokens, ends an output as a stop token does. Arithmetic is in float32, as in
transformers, so that ties and near-ties are resolved the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from paged_backend.api.request import FinishReason
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import NOTHING, Values


class Candidate(NamedTuple):
    """A possible next token."""

    token: int
    log_prob: float
    values: Mapping[str, Any] = NOTHING  # requested optional outputs, by name


class Continuation(NamedTuple):
    """A live beam of the next step: a live beam of this step, and one more token."""

    beam: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """An output that has ended."""

    score: np.float32
    tokens: tuple[int, ...]
    finish: FinishReason
    values: Values = field(default_factory=dict)  # requested optional outputs, a value for each token


def num_candidates(sampling: SamplingParams, stop_ids: frozenset[int]) -> int:
    """Return the number of continuations that a step examines, per beam and in total. It is large enough that
    beam_width continuations are left if the most likely ones are all stop tokens."""
    return max(2, 1 + len(stop_ids)) * sampling.beam_width


class BeamSearch:
    """The search of one request."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        ends: Callable[[Row[int]], bool] | None = None,
    ):
        """ends: returns whether an output ends after its last token; tokens of `stop_ids` end it in any case."""
        self._ends = ends
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._scores = [np.float32(0)]  # cumulative log probabilities of live beams
        self._values: list[Values] = [NOTHING]  # optional outputs of live beams
        self.hypotheses: list[Hypothesis] = []  # ended outputs, best first
        self.num_agreed = 0  # number of tokens that `agree` has returned

    def advance(self, outputs: Row[Row[int]], rows: Row[Row[Candidate]]) -> list[Continuation]:
        """Advance the search by one step, and return the next live beams, best first; empty if it has ended.

        outputs: the tokens that each live beam has generated. rows: the candidates of each beam, most likely first.
        """
        width, count = self._sampling.beam_width, len(outputs[0]) + 1
        limit = num_candidates(self._sampling, self._stop_ids)
        ranked = [
            (
                self._scores[beam] + np.float32(candidate.log_prob),
                Continuation(beam, candidate.token),
                candidate,
            )
            for beam, row in enumerate(rows)
            for candidate in row[:limit]
            if candidate.log_prob > -math.inf  # -inf: the token is not allowed
        ]
        # A stable sort: among equal scores the earlier beam comes first, as mostly in topk.
        ranked.sort(key=itemgetter(0), reverse=True)
        out_of_tokens = count >= self._sampling.max_tokens
        closed = self._full and self._sampling.early_stopping is True
        live = []
        for rank, (score, continuation, candidate) in enumerate(ranked[:limit]):
            tokens = (*outputs[continuation.beam], continuation.token)
            finish = self._finish(tokens, out_of_tokens)
            before = self._values[continuation.beam]
            values = {name: (*before.get(name, ()), value) for name, value in candidate.values.items()}
            if finish is None:
                live.append((score, continuation, values))
            elif rank < width and not closed:
                self._add(Hypothesis(self._normalized(score, count), tokens, finish, values))
        del live[width:]
        self._scores = [score for score, _, _ in live]
        self._values = [values for _, _, values in live]
        if not live or self._is_done(count):
            return []
        return [continuation for _, continuation, _ in live]

    def cut(self, outputs: Row[Row[int]]) -> None:
        """End the search early: live beams, with these `outputs`, become hypotheses as they are."""
        for score, tokens, values in zip(self._scores, outputs, self._values, strict=True):
            normalized = self._normalized(score, max(1, len(tokens)))
            self._add(Hypothesis(normalized, tuple(tokens), FinishReason.TIMEOUT, values))

    def agree(self, outputs: Row[Row[int]]) -> tuple[int, ...]:
        """Return the next tokens, as far as all outputs that may still be returned agree.

        outputs: the tokens that each live beam has generated.
        """
        contenders = [*outputs, *(hypothesis.tokens for hypothesis in self.hypotheses[: self._sampling.n])]
        first, end = contenders[0], self.num_agreed
        shortest = min(map(len, contenders))
        while end < shortest and all(tokens[end] == first[end] for tokens in contenders):
            end += 1
        agreed = tuple(first[self.num_agreed : end])
        self.num_agreed = end
        return agreed

    def agreed_values(self, count: int) -> Values:
        """Return the values of the `count` tokens that `agree` returned last."""
        return {name: values[self.num_agreed - count : self.num_agreed] for name, values in self._values[0].items()}

    @property
    def best(self) -> list[Hypothesis]:
        """The `n` outputs of a search that has ended. With a vocabulary of a few tokens there may be fewer; then the
        last one is repeated."""
        best = self.hypotheses[: self._sampling.n]
        return best + best[-1:] * (self._sampling.n - len(best))

    def _finish(self, tokens: Row[int], out_of_tokens: bool) -> FinishReason | None:
        """Return why an output ends, or None. If it ends by its text, the responder cuts the text and sets the
        reason."""
        if tokens[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if out_of_tokens or (self._ends and self._ends(tokens)) else None

    def _normalized(self, score: np.float32, length: int) -> np.float32:
        return score / np.float32(length**self._sampling.length_penalty)

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) == self._sampling.beam_width

    def _add(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.hypotheses[self._sampling.beam_width :]

    def _is_done(self, count: int) -> bool:
        """Return whether no live beam can still change the hypotheses, by the rule of `early_stopping`."""
        if not self._full:
            return False
        if self._sampling.early_stopping is True:
            return True
        is_optimistic = self._sampling.early_stopping == "never" and self._sampling.length_penalty > 0
        length = self._sampling.max_tokens if is_optimistic else count
        return not self._normalized(self._scores[0], length) > self.hypotheses[-1].score
