"""A sequence: the tokens of one sample of a request, the blocks that hold their keys and values, and progress."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from paged_backend.api.request import GenerateRequest
from paged_backend.api.thinking import Reasoning
from paged_backend.kv.content import Chain, Entry


@dataclass(eq=False, slots=True)
class BlockUsage:
    """How many blocks of the first kind of layer a request used; see the fields `blocks_...` of `Usage`."""

    new: int = 0
    reused: int = 0
    copied: int = 0
    from_host: int = 0


class Sequence:
    """One sample of a request. Owned by the scheduler, on the engine thread; its blocks by the `BlockManager`.

    tokens    | prompt ............ | generated ... | -3 |     -1 - i: placeholder for row i of the step in flight
    computed  |<----- keys and values planned ------------->|  at most len(tokens), usually one less
    committed |<----- keys and values written ------->|        equals computed if no step is in flight
    tables    |  b0  |  b1  |  b2  |  b3  |                    a block table for each kind of layer
              | NULL | NULL |  b9  |  b5  |                    a sliding window; NULL: no later token reads the block
              | NULL | NULL | NULL |  b8  |                    recurrent layers: the states after `computed` tokens
    chain        e0     e1     e2                              contents of full blocks, as far as computed
    """

    __slots__ = (
        "_reasoning", "chain", "committed", "computed", "ended", "history", "index", "key", "latest_checkpoint",
        "mask_seconds", "mask_turn", "num_prompt", "on_host", "placed", "request", "tables", "tokens", "usage",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerateRequest,
        tokens: list[int],
        chain: Chain,
        index: int = 0,
        *,
        usage: BlockUsage | None = None,
        num_kinds: int = 1,
    ):
        """index: number of this sample in the request. usage: counts the blocks of all samples of the request.
        num_kinds: kinds of layers of the model."""
        self.request, self.key = request, request.key
        self.tokens = tokens
        self.chain = chain
        self.index = index
        self.usage = usage or BlockUsage()
        self.num_prompt = len(request.prompt_token_ids)
        self.tables: list[list[int]] = [[] for _ in range(num_kinds)]
        self.on_host = False  # whether its blocks are on the host, as the request is swapped out
        self.latest_checkpoint: tuple[Entry | None, int] = (
            None,
            0,
        )  # content of its latest cached state, and its position
        self.computed = 0
        self.committed = 0
        # Tokens whose blocks may still have to be copied or moved, by a step that may fail or be taken back. They are
        # certain to be there once more tokens than these are committed.
        self.placed = 0
        self.ended = False
        self.history: array[int] = array("i")  # copy of `tokens` that prompt lookup searches
        self._reasoning: Reasoning | None = None  # of its first tokens, with a thinking budget
        self.mask_seconds = 0.0  # what its masks cost, by `MaskBudget`
        self.mask_turn = 0  # when its last mask was computed, by the budget's count; 0: never

    @property
    def num_blocks(self) -> int:
        """The length of its block tables."""
        return len(self.tables[0])

    @property
    def seed(self) -> int:
        """The seed of this sample: sample i of a request with seed s has the seed s + i."""
        return self.request.seed + self.index

    @property
    def pending(self) -> int:
        """The number of tokens still to compute: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """The number of tokens after the prompt, including placeholders."""
        return len(self.tokens) - self.num_prompt

    @property
    def has_all_tokens(self) -> bool:
        """True if max_tokens tokens are generated, or will be after the step in flight."""
        return 0 < self.request.sampling.max_tokens <= len(self.tokens) - self.num_prompt

    @property
    def needs_mask(self) -> bool:
        """True if its guide has yet to compute which tokens may come next."""
        guides = self.request.guides
        return bool(guides) and guides[self.index].seen < self.generated and self.tokens[-1] >= 0

    @property
    def awaits_token(self) -> bool:
        """True if its latest token is a placeholder, and that token decides whether the next one is forced."""
        budget = self.request.thinking
        if budget is None or self.tokens[-1] >= 0:
            return False
        reasoning = self.reasoning(len(self.tokens))
        return reasoning.length < len(self.tokens) and reasoning.is_open and budget.unforced(reasoning) <= 0

    def reasoning(self, end: int) -> Reasoning:
        """Return the reasoning in the tokens before `end`, or in those before a placeholder that is not forced. The
        request has a thinking budget."""
        budget = self.request.thinking
        assert budget is not None
        known = self._reasoning or self.request.prompt_reasoning
        self._reasoning = known = budget.follow(known, self.tokens[known.length : self.committed])
        return budget.follow(known, self.tokens[known.length : end])

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


SamplePosition = tuple[Sequence, int]  # a sequence and the position of the token to sample
