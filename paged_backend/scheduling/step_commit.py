"""Commits the results of a step: appends tokens, caches full blocks, and ends sequences."""

from __future__ import annotations

from paged_backend.api.request import Fingerprint, FinishReason, GenerateRequest, HiddenState, Logprobs, TokenDelta
from paged_backend.scheduling.beam_commit import BeamCommitter
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.plan import NO_BLOCKS, Chunk, Plan
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group, Sequence
from paged_backend.scheduling.stats import SchedulerCounters
from paged_backend.scheduling.step_result import StepResult


class StepCommitter:
    """Converts the results of a step into tokens of requests."""

    def __init__(
        self, requests: RequestRegistry, tables: BlockTables, beams: BeamCommitter, counters: SchedulerCounters
    ):
        self._requests = requests
        self._tables = tables
        self._beams = beams
        self._counters = counters

    def commit(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Commit every chunk. Skips requests and samples that have ended since the step was planned."""
        deltas: list[TokenDelta] = []
        running, tables, errors, logprobs = self._requests.running, self._tables, result.errors, result.logprobs
        fingerprints = result.fingerprints
        sampled = 0  # index of the sampled sequence, over all chunks
        for index, chunk in enumerate(plan.chunks):
            group = running.get(chunk.sequence.request.key)
            if group:
                if chunk.allocated is not NO_BLOCKS and not chunk.sequence.ended:
                    tables.count(group, chunk.allocated)
                for sequence in (chunk.sequence, *chunk.forks):  # the leader may have ended while its samples continue
                    if not sequence.ended:
                        tables.commit(sequence, chunk.start + chunk.length - len(chunk.draft_tokens))
            if plan.has_prompt_outputs and group:
                deltas += self._commit_prompt(group, chunk, result, index)
            for sequence in chunk.sampled_sequences:
                if group is not None and not sequence.ended:
                    if sampled in errors:
                        deltas.append(self._requests.fail_group(group, errors[sampled]))
                    elif group.beams:
                        candidates = _with_fingerprints(result.candidates[sampled], fingerprints.get(sampled))
                        deltas += self._beams.commit(group, sequence, candidates)
                    else:
                        delta = self._append(group, sequence, result.tokens[sampled], chunk)
                        if sampled in fingerprints:
                            delta = delta._replace(fingerprints=tuple(fingerprints[sampled][: len(delta.token_ids)]))
                        deltas.append(_with_logprobs(delta, logprobs[sampled]) if sampled in logprobs else delta)
                sampled += 1
        assert sampled == len(result.tokens), f"{len(result.tokens)} results for {sampled} sequences"
        return deltas

    def _append(self, group: Group, sequence: Sequence, tokens: list[int], chunk: Chunk) -> TokenDelta:
        """Append the new tokens of a sequence, up to the one that ends the output."""
        request, first = sequence.request, sequence.committed
        sequence.tokens[first] = tokens[0]
        finish = _finish_reason(request, tokens[0], first + 1 - sequence.num_prompt)
        if chunk.draft_tokens:
            self._counters.accepted_tokens += len(tokens) - 1
            group.draft_tokens += len(chunk.draft_tokens)
            group.accepted_tokens += len(tokens) - 1
            count = 1
            while finish is None and count < len(tokens):
                finish = _finish_reason(request, tokens[count], first + 1 + count - sequence.num_prompt)
                count += 1
            tokens = tokens[:count]
            self._tables.accept(group, sequence, tokens)
            self._tables.states.accept(sequence, chunk.draft_slots, count - 1)
            group.account.served_tokens += count - 1  # one token was counted when the step was planned
        if finish:
            self._requests.finish_sequence(group, sequence)
        return TokenDelta(request.key, tuple(tokens), finish, None, sequence.index, group.usage)

    def _commit_prompt(self, group: Group, chunk: Chunk, result: StepResult, index: int) -> list[TokenDelta]:
        """Commit the prompt results of a chunk: log probabilities, a hidden state, the end of a request without
        output."""
        if index in result.prompt_errors:
            return [self._requests.fail_group(group, result.prompt_errors[index])]
        deltas: list[TokenDelta] = []
        if chunk.scored:
            # If the leader ends, the next one computes the prompt again, while results of the former still arrive.
            known = len(group.prompt_logprobs) - chunk.scored.start
            assert known >= 0
            group.prompt_logprobs += result.prompt_logprobs[index][known:]
            group.prompt_fingerprints += result.prompt_fingerprints.get(index, [])[known:]
        if group.prompt_logprobs:
            self._tables.scores.store(group)
        if group.scores_prompt and not group.unscored(0, chunk.sequence.num_prompt):
            group.scores_prompt = False
            scores, fingerprints = tuple(group.prompt_logprobs), tuple(group.prompt_fingerprints)
            deltas.append(TokenDelta(group.key, prompt_logprobs=scores, prompt_fingerprints=fingerprints))
        if chunk.ends_request and (chunk.forks or not chunk.sequence.ended):
            deltas += self._finish_without_output(group, result.hidden_states.get(index))
        return deltas

    def _finish_without_output(self, group: Group, hidden: HiddenState | None) -> list[TokenDelta]:
        """End a request after its prompt."""
        finish = FinishReason.LENGTH if hidden is None else FinishReason.STOP
        self._requests.finish_all(group)
        return [
            TokenDelta(group.key, finish=finish, sample=index, usage=group.usage, hidden=hidden)
            for index in range(group.request.sampling.num_samples)
        ]


def _with_fingerprints(candidates: list[Candidate], fingerprints: list[Fingerprint] | None) -> list[Candidate]:
    """Return the candidates of a beam with the fingerprint of its logits, if it is requested."""
    return [one._replace(fingerprint=fingerprints[0]) for one in candidates] if fingerprints else candidates


def _with_logprobs(delta: TokenDelta, logprobs: list[Logprobs]) -> TokenDelta:
    return delta._replace(logprobs=tuple(logprobs[: len(delta.token_ids)]))


def _finish_reason(request: GenerateRequest, token: int, length: int) -> FinishReason | None:
    """Return why an output of `length` tokens ends with its last token, or None if it continues."""
    if token in request.stop_ids and (request.guides or length >= request.sampling.min_tokens):
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= request.sampling.max_tokens else None
