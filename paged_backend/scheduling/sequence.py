"""A sequence: its tokens, the blocks that hold their keys and values, and how far they are computed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from paged_backend.api.request import GenerateRequest, Logprobs, Usage
from paged_backend.scheduling.accounts import Account
from paged_backend.scheduling.beam_search import BeamSearch, Candidate
from paged_backend.scheduling.content import Chain


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request. Owned by the scheduler, on the engine thread.

    tokens    | prompt ............ | generated ... | -3 |     -1 - i: what draw i of the step in flight will give
    computed  |<----- keys and values planned ------------->|  at most len(tokens), usually one less
    committed |<----- and known to be in the pages --->|       the same between steps, if none is in flight
    blocks    |  b0  |  b1  |  b2  |  b3  |                    allocated only as tokens arrive
    chain        e0     e1     e2                              what full blocks hold, as far as worked out
    """

    request: GenerateRequest
    tokens: list[int]
    chain: Chain
    index: int = 0  # among the request's samples
    blocks: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)  # the host's blocks instead, while it waits after a preemption
    computed: int = 0
    committed: int = 0
    ended: bool = False
    history: array[int] = field(default_factory=lambda: array("i"))  # the tokens again, where guesses are looked for
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def seed(self) -> int:
        """Sample i of seed s draws what a request of seed s + i draws."""
        return self.request.seed + self.index

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be planned: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def has_all(self) -> bool:
        """Whether nothing is to be drawn any more, but perhaps to be committed."""
        return 0 < self.request.sampling.max_tokens <= len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


Draw = tuple[Sequence, int]  # a sequence, and the position of the token to draw: there may be later ones already


@dataclass(eq=False, slots=True)
class Beams:
    """A beam search under way. Its live beams are the group's sequences, the best first; each step forks and drops
    some of them, all at once."""

    search: BeamSearch
    rows: dict[int, list[Candidate]] = field(default_factory=dict)  # this step's so far, by the sequence's index
    ended: set[int] = field(default_factory=set)  # outputs that have met a stop string


@dataclass(eq=False, slots=True)
class Group:
    """A request with all its samples. The prompt is computed once, by the first that lives; then the others fork.

    sequences   0  | prompt ........... | a b c d       the prompt's blocks are in every block table; who writes
                1  | (the same blocks)  | e f           into a shared block gets a copy of it first
    """

    request: GenerateRequest
    account: Account  # its tenant's, or its own
    sequences: list[Sequence]  # those that have not ended, by index
    forked: bool
    turn: int | None = None  # grows from one that is let in to the next; None: it waits for the first time
    beams: Beams | None = None
    cached_tokens: int = 0  # this and those below: see Usage
    blocks_new: int = 0
    blocks_reused: int = 0
    blocks_copied: int = 0
    blocks_from_host: int = 0
    preemptions: int = 0
    preempted_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preempted_at: float = 0.0  # the last time, by the scheduler's clock
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of its tokens after the first, as far as computed
    scores_prompt: bool = field(init=False)
    has_output: bool = field(init=False)

    def __post_init__(self) -> None:
        self.scores_prompt = self.request.sampling.prompt_logprobs is not None
        self.has_output = self.request.sampling.max_tokens > 0

    @classmethod
    def of(cls, request: GenerateRequest, account: Account | None = None) -> Group:
        account = account or Account(request.sampling.priority, request.sampling.cache_salt)
        tokens, origin = list(request.prompt_token_ids), request.origin
        if request.sampling.beam_width > 1:
            search = BeamSearch(request.sampling, request.stop_ids, request.ends)
            beam = Sequence(request, tokens, Chain(origin))
            return cls(request, account, [beam], forked=True, beams=Beams(search))
        sequences = [
            Sequence(request, list(tokens), Chain(origin), index) for index in range(request.sampling.num_samples)
        ]
        return cls(request, account, sequences, forked=len(sequences) == 1)

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def priority(self) -> int:
        return self.request.sampling.priority

    @property
    def rank(self) -> tuple[int, int]:
        """Of one that runs: by priority, and within one by who was let in first."""
        assert self.turn is not None
        return self.priority, self.turn

    @property
    def usage(self) -> Usage | None:
        if not self.request.returns_usage:
            return None
        return Usage(
            self.cached_tokens,
            self.blocks_new,
            self.blocks_reused,
            self.blocks_copied,
            self.blocks_from_host,
            self.preemptions,
            self.preempted_seconds,
            self.draft_tokens,
            self.accepted_tokens,
        )

    @property
    def leader(self) -> Sequence:
        return self.sequences[0]

    @property
    def num_seqs(self) -> int:
        """Sequences that may compute in one step, now or later."""
        return self.request.sampling.beam_width if self.beams else len(self.sequences)

    @property
    def in_turn(self) -> bool:
        """Whether a step needs to know what the one before has drawn."""
        return self.beams is not None or bool(self.request.guides)

    @property
    def swapped(self) -> bool:
        return any(sequence.swapped for sequence in self.sequences)

    @property
    def active(self) -> list[Sequence]:
        """Those that may compute now."""
        return self.sequences if self.forked else self.sequences[:1]

    def unscored(self, start: int, end: int) -> range:
        """Of the positions from `start` to `end` those after which the prompt's next token is still to be scored."""
        if not self.scores_prompt:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.leader.num_prompt - 1))

    @property
    def findable(self) -> int:
        """Tokens of the leader that may be looked for in the cache, which has no logits: those that are to be computed
        anyway, the first whose logits are wanted included."""
        scored = len(self.prompt_logprobs)
        return self.feed if not self.unscored(0, self.leader.num_prompt) else scored + 1

    @property
    def feed(self) -> int:
        """Tokens of the leader that are to be computed before the group forks, or at all once it has."""
        return len(self.leader.tokens) if self.forked else self.leader.num_prompt
