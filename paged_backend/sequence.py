"""A sequence: its tokens, the blocks that hold their keys and values, and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_backend.request import GenerateRequest


@dataclass(eq=False)
class Sequence:
    """Owned by the scheduler, on the engine thread.

    tokens   | prompt ............ | generated ... |
    computed |<------ keys and values in the pages ->|        (at most len(tokens), usually one less)
    blocks   |  b0  |  b1  |  b2  |  b3  |                    allocated only as tokens arrive
    """

    request: GenerateRequest
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, request: GenerateRequest) -> Sequence:
        return cls(request, list(request.prompt_token_ids))

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to be computed: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.num_prompt
