"""Groups: the samples of a request, and what the scheduler knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paged_backend.api.request import GenerateRequest, Progress, Usage
from paged_backend.kv.content import Chain
from paged_backend.kv.sequence import BlockUsage, Sequence
from paged_backend.scheduling.beam_search import BeamSearch, Candidate


@dataclass(eq=False, slots=True)
class Account:
    """The counter of one tenant within one priority."""

    priority: int
    tenant: str
    served_tokens: int = 0
    num_open: int = 0  # open requests, waiting or admitted
    num_waiting: int = 0  # open requests that were never admitted


@dataclass(eq=False, slots=True)
class BeamState:
    """A beam search in progress. The live beams are the group's sequences, the most likely first; each step forks and
    drops some of them."""

    search: BeamSearch
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)  # candidates of this step, by sequence index
    ended: set[int] = field(default_factory=set)  # indices of outputs that ended with a stop string


class Group:
    """A request with all of its samples. The first sequence computes the prompt; then the others fork from it.

    sequences   0  | prompt ........... | a b c d       all block tables share the prompt's blocks; a sequence that
                1  | (the same blocks)  | e f           writes into a shared block gets a copy of it first
    """

    __slots__ = (
        "accepted_tokens", "account", "admission_index", "beams", "block_usage", "cached_tokens", "draft_tokens",
        "forked", "has_output", "key", "needs_previous_result", "num_stored_scores", "preempted_at",
        "preempted_seconds", "preemptions", "prompt_values", "request", "scores_prompt",
        "sequences",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest, account: Account | None = None, num_kinds: int = 1):
        """account: the tenant's account; by default one for this request alone. num_kinds: kinds of layers of the
        model."""
        sampling, progress = request.sampling, request.progress
        self.request, self.key = request, request.key
        self.account = account or Account(sampling.priority, sampling.cache_salt)
        is_beam_search = sampling.beam_width > 1
        self.beams = BeamState(BeamSearch(sampling, request.stop_ids, request.ends)) if is_beam_search else None
        outputs = progress.outputs if progress else ((),) * (1 if is_beam_search else sampling.num_samples)
        self.block_usage = BlockUsage()
        self.sequences = [  # sequences that have not ended, by index
            Sequence(
                request,
                [*request.prompt_token_ids, *output],
                Chain(request.origin),
                index,
                usage=self.block_usage,
                num_kinds=num_kinds,
            )
            for index, output in enumerate(outputs)
            if output is not None
        ]
        self.forked = len(self.sequences) == 1
        # Whether optional outputs of the prompt are still to be returned. A prompt of one token has none.
        self.scores_prompt = bool(request.prompt_outputs) and not (
            (progress and progress.has_prompt_values) or len(request.prompt_token_ids) == 1
        )
        self.has_output = sampling.max_tokens > 0
        # Beams continue from the candidates of the previous step, and guides depend on its tokens.
        self.needs_previous_result = is_beam_search or bool(request.guides)
        self.admission_index: int | None = None  # number of the first admission, in order; None: never admitted
        # Values of the prompt tokens after the first, as far as they are computed, by optional output.
        self.prompt_values: dict[str, list[Any]] = {name: [] for name in request.prompt_outputs}
        self.num_stored_scores = 0  # blocks of the prompt whose scores were offered to the cache
        self.cached_tokens = 0  # prompt tokens found in the cache at the first admission
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.preemptions = 0
        self.preempted_at = 0.0  # time of the last preemption, by the scheduler's clock
        self.preempted_seconds = 0.0

    @property
    def priority(self) -> int:
        """The priority of the request; a lower number comes first."""
        return self.request.sampling.priority

    @property
    def scheduling_order(self) -> tuple[int, int]:
        """The order of running requests: by priority, then by first admission."""
        assert self.admission_index is not None
        return self.priority, self.admission_index

    @property
    def usage(self) -> Usage | None:
        if not self.request.returns_usage:
            return None
        blocks, progress = self.block_usage, self.request.progress
        usage = Usage(
            self.cached_tokens,
            blocks.new,
            blocks.reused,
            blocks.copied,
            blocks.from_host,
            self.preemptions,
            self.preempted_seconds,
            self.draft_tokens,
            self.accepted_tokens,
        )
        return progress.usage.plus(usage) if progress and progress.usage else usage

    @property
    def can_move(self) -> bool:
        """Whether another engine can continue the request. The beams of a search that has returned tokens are not
        moved."""
        return self.request.can_move and not (self.beams and self.beams.search.num_agreed)

    @property
    def progress(self) -> Progress | None:
        """What another engine needs besides the request to continue it; None if nothing was generated."""
        outputs: list[tuple[int, ...] | None] = [None] * self.request.sampling.num_samples
        for sequence in self.sequences:
            outputs[sequence.index] = tuple(sequence.output)
        is_scored = bool(self.request.prompt_outputs) and not self.scores_prompt
        if self.beams or not (is_scored or any(output != () for output in outputs)):
            return None
        return Progress(tuple(outputs), is_scored, self.usage, self.request.origin.adapter)

    @property
    def leader(self) -> Sequence:
        """The sequence that computes the prompt."""
        return self.sequences[0]

    @property
    def num_seqs(self) -> int:
        """The maximum number of sequences that compute in one step, now or later."""
        return self.request.sampling.beam_width if self.beams else len(self.sequences)

    @property
    def is_swapped(self) -> bool:
        return any(sequence.on_host for sequence in self.sequences)

    @property
    def active(self) -> list[Sequence]:
        """The sequences that may compute: the leader alone until the group forks."""
        return self.sequences if self.forked else self.sequences[:1]

    @property
    def num_scored(self) -> int:
        """The number of prompt tokens after the first whose values are known."""
        return len(next(iter(self.prompt_values.values()), ()))

    def unscored(self, start: int, end: int) -> range:
        """Return the positions in `start` to `end` whose next prompt token lacks its values."""
        if not self.scores_prompt:
            return range(0)
        return range(max(start, self.num_scored), min(end, self.leader.num_prompt - 1))

    @property
    def max_cacheable_tokens(self) -> int:
        """The number of the leader's tokens that may be looked up in the prefix cache: up to the first position whose
        logits are still needed, since the cache holds no logits."""
        return self.num_scored + 1 if self.unscored(0, self.leader.num_prompt) else self.prefill_len

    @property
    def prefill_len(self) -> int:
        """The number of the leader's tokens to compute before the group forks; all of its tokens afterwards."""
        return len(self.leader.tokens) if self.forked else self.leader.num_prompt
