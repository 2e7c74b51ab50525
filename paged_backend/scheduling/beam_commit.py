"""Commits the steps of beam searches."""

from __future__ import annotations

from paged_backend.api.request import TokenDelta
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.block_tables import BlockTables
from paged_backend.scheduling.registry import RequestRegistry
from paged_backend.scheduling.sequence import Group, Sequence


class BeamCommitter:
    """Advances the beam searches of groups, and returns the tokens of their outputs."""

    def __init__(self, requests: RequestRegistry, tables: BlockTables):
        self._requests = requests
        self._tables = tables

    def commit(self, group: Group, sequence: Sequence, candidates: list[Candidate]) -> list[TokenDelta]:
        """Store a live beam's candidates. Once every live beam has its own, advance the search: fork the beams that
        continue in several ways, and drop those that do not continue."""
        beams = group.beams
        assert beams
        beams.candidates[sequence.index] = candidates
        if len(beams.candidates) < len(group.sequences):
            return []
        rows = [beams.candidates[one.index] for one in group.sequences]
        beams.candidates.clear()
        continuations = beams.search.advance([one.output for one in group.sequences], rows)
        self._tables.branch(group, continuations)
        if continuations:
            return self._agreed(group)
        self._requests.remove(group)
        return self._outputs(group)

    def expire(self, group: Group) -> list[TokenDelta]:
        """End a search early, with the best outputs so far, finished or not."""
        assert group.beams
        group.beams.search.cut([one.output for one in group.sequences])
        self._requests.abort(group)
        return self._outputs(group)

    def _agreed(self, group: Group) -> list[TokenDelta]:
        """Return the new tokens that all outputs have in common, for each output."""
        assert group.beams
        tokens = group.beams.search.agree([one.output for one in group.sequences])
        if not tokens:
            return []
        outputs = (index for index in range(group.request.sampling.n) if index not in group.beams.ended)
        logprobs = group.beams.search.agreed_logprobs(len(tokens))
        delta = TokenDelta(group.key, tokens, usage=group.usage, logprobs=logprobs)
        delta = delta._replace(fingerprints=group.beams.search.agreed_fingerprints(len(tokens)))
        return [delta._replace(sample=index) for index in outputs]

    def _outputs(self, group: Group) -> list[TokenDelta]:
        """Return the outputs of a search that has ended, without the tokens that were returned before."""
        assert group.beams
        sent = group.beams.search.num_agreed
        return [
            TokenDelta(
                group.key,
                one.tokens[sent:],
                one.finish,
                sample=index,
                usage=group.usage,
                logprobs=one.logprobs[sent:],
                fingerprints=one.fingerprints[sent:],
            )
            for index, one in enumerate(group.beams.search.best)
            if index not in group.beams.ended
        ]
