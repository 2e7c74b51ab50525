"""Takes prompt log probabilities from cached blocks, and stores them there."""

from __future__ import annotations

from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.block_scores import BlockScores
from paged_backend.scheduling.sequence import Group


class ScoreCache:
    """The scores of the blocks of the device's prefix cache. Does nothing if the block manager keeps none."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks

    def take(self, group: Group) -> None:
        """Continue a group's prompt scores with those of cached blocks, up to the first block that lacks some.

        They stay valid if the blocks are evicted before the group is admitted, since they depend on the tokens alone.
        """
        if not (self._blocks.keeps_scores and group.scores_prompt):
            return
        leader, size, cache = group.leader, self._blocks.block_size, self._blocks.cache
        num_top, digest = group.num_top_prompt, group.request.sampling.logits_digest
        for index in range(self._num_complete(group), leader.num_prompt // size):
            scores = cache.find_scores(leader.chain, leader.tokens, index)
            if scores is None or not scores.covers(num_top, fingerprints=digest):
                break
            known = len(group.prompt_logprobs) - _first_score(index, size)
            group.prompt_logprobs += scores.logprobs(num_top)[known:]
            if digest:
                group.prompt_fingerprints += scores.fingerprints[known:]
            group.num_stored_scores = max(group.num_stored_scores, index + 1)

    def store(self, group: Group) -> None:
        """Store the scores of those full blocks of the prompt that are cached and have none."""
        if not self._blocks.keeps_scores:
            return
        leader, size, cache = group.leader, self._blocks.block_size, self._blocks.cache
        end = min(leader.committed // size, self._num_complete(group))
        for index in range(group.num_stored_scores, end):
            tokens = slice(_first_score(index, size), (index + 1) * size - 1)
            scores = BlockScores(group.num_top_prompt, group.prompt_logprobs[tokens], group.prompt_fingerprints[tokens])
            cache.add_scores(leader.chain, leader.tokens, index, scores)
        group.num_stored_scores = max(group.num_stored_scores, end)

    def _num_complete(self, group: Group) -> int:
        """Return how many blocks, from the first on, the group has all scores of."""
        return (len(group.prompt_logprobs) + 1) // self._blocks.block_size


def _first_score(index: int, block_size: int) -> int:
    """Return which score of a prompt is the first of a block. The first token of a prompt has none."""
    return max(0, index * block_size - 1)
