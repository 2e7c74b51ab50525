"""Conversations for the simulation of a fleet: when they start, and the lengths of their turns.

Each conversation has one of several system prompts, the first of which are more popular (Zipf), and 1 to MAX_TURNS
turns. The prompt of a turn is the whole text so far and a new message; the lengths of messages and replies are
log-normal with ShareGPT's means. The user thinks between two turns.

Token ids only have to tell texts apart: all tokens of system prompt s are s, and all others of conversation c are the
number of system prompts + c.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from paged_bench._workload import DATASETS, lengths

MAX_TURNS = 8
CONTINUES = 2 / 3  # probability that a conversation has another turn
SYSTEM_TOKENS = (256, 1024)  # shortest and longest system prompt
MAX_CONTEXT = 8192  # tokens; a conversation ends before the turn that would exceed it
THINK_SECONDS = 5.0  # mean time from the end of a reply to the next message, exponentially distributed
PROMPTS_PER_REPLICA = 2
MAX_PROMPTS = 128
_NUM_LENGTHS = 4000  # lengths of messages and replies to draw from


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int  # tokens of the whole prompt
    reply: int
    think: float  # seconds after the reply until the next turn


@dataclass(frozen=True, slots=True)
class Conversation:
    number: int
    start: float  # seconds
    system: int  # number of the system prompt
    system_tokens: int
    token: int  # id of all tokens after the system prompt
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Return the token ids of a turn's prompt."""
        own = self.turns[turn].prompt - self.system_tokens
        return (self.system,) * self.system_tokens + (self.token,) * own


class Workload:
    """An endless sequence of conversations that start at random times (a Poisson process).

    Args:
        num_prompts: number of system prompts.
        rate: conversations per second.
        seed: the same seed gives the same conversations, whose times are in proportion to the rate.
    """

    def __init__(self, num_prompts: int, rate: float, seed: int) -> None:
        rng = random.Random(seed)
        self.num_prompts = num_prompts
        self.rate = rate
        self._seed = seed
        self._systems = [rng.randint(*SYSTEM_TOKENS) for _ in range(num_prompts)]
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(num_prompts)))
        self._messages, self._replies = (lengths(mean, _NUM_LENGTHS, rng) for mean in DATASETS["ShareGPT"])

    def __iter__(self) -> Iterator[Conversation]:
        rng = random.Random(f"{self._seed} conversations")
        start = 0.0
        for number in itertools.count():
            start += rng.expovariate(self.rate)
            system = rng.choices(range(self.num_prompts), cum_weights=self._weights)[0]
            length = self._systems[system]
            yield Conversation(number, start, system, length, self.num_prompts + number, self._turns(length, rng))

    def _turns(self, text: int, rng: random.Random) -> tuple[Turn, ...]:
        """Draw the turns of a conversation. text: tokens of its system prompt."""
        turns: list[Turn] = []
        while not turns or (len(turns) < MAX_TURNS and rng.random() < CONTINUES):
            prompt, reply = text + rng.choice(self._messages), rng.choice(self._replies)
            if prompt + reply > MAX_CONTEXT:
                break
            turns.append(Turn(prompt, reply, rng.expovariate(1 / THINK_SECONDS)))
            text = prompt + reply
        return tuple(turns)


@dataclass(frozen=True)
class MeanLengths:
    """Means over many conversations."""

    turns: float  # per conversation
    prompt: float  # tokens per turn
    reply: float


def mean_lengths(num_prompts: int, seed: int) -> MeanLengths:
    """Return the means of the first conversations of a workload."""
    some = list(itertools.islice(Workload(num_prompts, 1.0, seed), 5000))
    turns = [turn for one in some for turn in one.turns]
    return MeanLengths(
        turns=len(turns) / len(some),
        prompt=statistics.mean(turn.prompt for turn in turns),
        reply=statistics.mean(turn.reply for turn in turns),
    )


def num_prompts(replicas: int) -> int:
    """Return the number of system prompts of a fleet: larger fleets serve more applications."""
    return min(MAX_PROMPTS, PROMPTS_PER_REPLICA * replicas)
