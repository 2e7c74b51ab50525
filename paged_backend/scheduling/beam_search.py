"""Which beams live on, as transformers' `generate(num_beams=...)` decides it. Tokens and scores only.

    live          the beam_width likeliest outputs that may go on; each step continues them all
    hypotheses    outputs that ended, the best of them, scored by log-probability / length ** length_penalty

Of the (1 + number of stop tokens) * beam_width likeliest continuations of all live beams, those that stop become
hypotheses where they are among the first beam_width, and the best beam_width of the rest live on. A stop string, or a
word of several tokens, stops an output as a stop token does. Arithmetic is in
float32, as there, so that ties and near-ties fall the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paged_backend.api.request import FinishReason, Logprobs
from paged_backend.api.sampling_params import SamplingParams


class Candidate(NamedTuple):
    """A token that may come next."""

    token: int
    log_prob: float
    logprobs: Logprobs = ()  # of it and the likeliest, under the model's own distribution, where they are asked for


class Continuation(NamedTuple):
    """A live beam of the next step: a live beam of this one, and a token more."""

    beam: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """An output that ended."""

    score: np.float32
    tokens: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[Logprobs, ...] = ()  # of each token


def num_candidates(sampling: SamplingParams, stop_ids: frozenset[int]) -> int:
    """How many continuations, of each beam and of all, a step has to look at: even if every beam's first ones are
    stop tokens, beam_width are left."""
    return max(2, 1 + len(stop_ids)) * sampling.beam_width


class BeamSearch:
    """The search of one request."""

    def __init__(
        self,
        sampling: SamplingParams,
        stop_ids: frozenset[int],
        ends: Callable[[Row[int]], bool] | None = None,
    ):
        """ends: whether an output has ended with its last token, beside those of `stop_ids`."""
        self._ends = ends
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._scores = [np.float32(0)]  # of live beams
        self._logprobs: list[tuple[Logprobs, ...]] = [()]  # of their tokens
        self.hypotheses: list[Hypothesis] = []  # the best first
        self.num_agreed = 0  # tokens that `agree` has given

    def advance(self, outputs: Row[Row[int]], rows: Row[Row[Candidate]]) -> list[Continuation]:
        """One step on. outputs: the tokens that each live beam has generated; rows: the candidates of each, the
        likeliest first. The live beams of the next step, the best first; none where the search has ended."""
        width, count = self._sampling.beam_width, len(outputs[0]) + 1
        most = num_candidates(self._sampling, self._stop_ids)
        found = [
            (
                self._scores[beam] + np.float32(candidate.log_prob),
                Continuation(beam, candidate.token),
                candidate.logprobs,
            )
            for beam, row in enumerate(rows)
            for candidate in row[:most]
            if candidate.log_prob > -math.inf  # else it must not be drawn
        ]
        found.sort(key=lambda one: one[0], reverse=True)  # stable: of equals the earlier beam, as topk mostly does
        out_of_tokens = count >= self._sampling.max_tokens
        closed = self._full and self._sampling.early_stopping is True
        live = []
        for rank, (score, continuation, logprobs) in enumerate(found[:most]):
            tokens = (*outputs[continuation.beam], continuation.token)
            finish = self._finish(tokens, out_of_tokens)
            told = self._logprobs[continuation.beam]
            told = (*told, logprobs) if logprobs else told
            if finish is None:
                live.append((score, continuation, told))
            elif rank < width and not closed:
                self._keep(Hypothesis(self._normalised(score, count), tokens, finish, told))
        del live[width:]
        self._scores = [score for score, _, _ in live]
        self._logprobs = [told for _, _, told in live]
        if not live or self._settled(count):
            return []
        return [continuation for _, continuation, _ in live]

    def cut(self, outputs: Row[Row[int]]) -> None:
        """End the search before its time: live beams, whose `outputs` these are, are hypotheses as they stand."""
        for score, tokens, told in zip(self._scores, outputs, self._logprobs, strict=True):
            normalised = self._normalised(score, max(1, len(tokens)))
            self._keep(Hypothesis(normalised, tuple(tokens), FinishReason.TIMEOUT, told))

    def agree(self, outputs: Row[Row[int]]) -> tuple[int, ...]:
        """Tokens, past those given before, that every output which may still be returned has: `outputs` are those of
        the live beams."""
        contenders = [*outputs, *(one.tokens for one in self.hypotheses[: self._sampling.n])]
        first, end = contenders[0], self.num_agreed
        shortest = min(map(len, contenders))
        while end < shortest and all(one[end] == first[end] for one in contenders):
            end += 1
        agreed = tuple(first[self.num_agreed : end])
        self.num_agreed = end
        return agreed

    def agreed_logprobs(self, count: int) -> tuple[Logprobs, ...]:
        """Of the `count` tokens that `agree` gave last, which every live beam has."""
        return self._logprobs[0][self.num_agreed - count : self.num_agreed]

    @property
    def best(self) -> list[Hypothesis]:
        """The `n` outputs of a search that has ended. A vocabulary of a few tokens may not have as many: then the last
        one stands in."""
        found = self.hypotheses[: self._sampling.n]
        return found + found[-1:] * (self._sampling.n - len(found))

    def _finish(self, tokens: Row[int], out_of_tokens: bool) -> FinishReason | None:
        """Of an output that stops by its text the client's side tells so: it cuts what the text has too much."""
        if tokens[-1] in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if out_of_tokens or (self._ends and self._ends(tokens)) else None

    def _normalised(self, score: np.float32, length: int) -> np.float32:
        return score / np.float32(length**self._sampling.length_penalty)

    @property
    def _full(self) -> bool:
        return len(self.hypotheses) == self._sampling.beam_width

    def _keep(self, hypothesis: Hypothesis) -> None:
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda one: one.score, reverse=True)
        del self.hypotheses[self._sampling.beam_width :]

    def _settled(self, count: int) -> bool:
        """Whether no live beam can still change the hypotheses, by the rule that `early_stopping` names."""
        if not self._full:
            return False
        if self._sampling.early_stopping is True:
            return True
        optimist = self._sampling.early_stopping == "never" and self._sampling.length_penalty > 0
        length = self._sampling.max_tokens if optimist else count
        return not self._normalised(self._scores[0], length) > self.hypotheses[-1].score
