"""Conversations with shared system prompts through the OpenAI gateway, and how much of each turn was cached."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paged_bench._server_load import WORDS

TIMEOUT = 120  # seconds for a turn


@dataclass(frozen=True)
class Shape:
    """The lengths of conversations."""

    systems: int = 8  # system prompts, shared by the conversations
    turns: int = 6
    system_words: int = 96
    user_words: int = 16
    reply_tokens: int = 16

    def words(self) -> int:
        """Return the words of a whole conversation without its system prompt and replies."""
        return self.turns * self.user_words


@dataclass(frozen=True)
class Turn:
    """A finished turn, or a failed one."""

    ended: float  # time.monotonic()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class Conversation:
    """The messages of a conversation so far."""

    def __init__(self, shape: Shape, number: int) -> None:
        self._shape = shape
        self._random = random.Random(number)
        system = _words(random.Random(-1 - number % shape.systems), shape.system_words)
        self._messages = [{"role": "system", "content": system}]

    async def turn(self, session: Any, url: str, sampling: dict[str, Any]) -> Turn:
        """Ask the gateway for the next reply. session: an aiohttp.ClientSession."""
        message = {"role": "user", "content": _words(self._random, self._shape.user_words)}
        body = {"model": "paged_llm", "messages": [*self._messages, message], **sampling}
        body |= {"max_tokens": self._shape.reply_tokens, "ignore_eos": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            answer = await reply.json()
            if reply.status != 200:
                return Turn(time.monotonic(), error=f"{reply.status}: {answer['error']['message']}")
        usage = answer["usage"]
        self._messages += [message, answer["choices"][0]["message"]]
        return Turn(time.monotonic(), usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def hit_rate(turns: Sequence[Turn]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.prompt_tokens for turn in turns))


def interleaved(url: str, shape: Shape, count: int, at_once: int, sampling: dict[str, Any]) -> list[Turn]:
    """Run the first turns of all conversations, then the second ones, and so on, each in a random order of its own.

    Args:
        url: the gateway.
        at_once: number of open requests.
        sampling: fields of the requests.
    """

    async def run(session: Any) -> list[Turn]:
        conversations, slots, turns = [Conversation(shape, number) for number in range(count)], at_once, list[Turn]()

        async def work(waiting: Iterator[Conversation]) -> None:
            for conversation in waiting:
                turns.append(await conversation.turn(session, url, sampling))

        for number in range(shape.turns):
            waiting = iter(random.Random(number).sample(conversations, count))
            await asyncio.gather(*(work(waiting) for _ in range(slots)))
        return turns

    return _with_session(run)


def steady(
    url: str,
    shape: Shape,
    at_once: int,
    seconds: float,
    sampling: dict[str, Any],
    halfway: Callable[[], object],
) -> tuple[list[Turn], float]:
    """Run conversations one after the other, `at_once` at any time. Return the turns, and the time of `halfway`.

    Args:
        seconds: duration of each half; `halfway` is called between them.
    """

    async def run(session: Any) -> tuple[list[Turn], float]:
        turns, numbers, end = list[Turn](), itertools.count(), time.monotonic() + 2 * seconds

        async def work() -> None:
            while time.monotonic() < end:
                conversation = Conversation(shape, next(numbers))
                for _ in range(shape.turns):
                    turns.append(await conversation.turn(session, url, sampling))

        working = [asyncio.ensure_future(work()) for _ in range(at_once)]
        await asyncio.sleep(seconds)
        event = time.monotonic()
        await asyncio.to_thread(halfway)
        await asyncio.gather(*working)
        return turns, event

    return _with_session(run)


def recovery(turns: Sequence[Turn], event: float, share: float, window: float) -> float | None:
    """Return the seconds after `event` from which on the hit rate of each window is at least `share` of the one before.

    None if it does not recover.
    """
    before = hit_rate([turn for turn in turns if event - 10 * window <= turn.ended < event])
    after = [turn for turn in turns if turn.ended >= event]
    last = max((turn.ended for turn in after), default=event)
    recovered = 0.0
    for index in range(int((last - event) / window)):
        start = event + index * window
        part = [turn for turn in after if start <= turn.ended < start + window]
        if hit_rate(part) < share * before:
            recovered = (index + 1) * window
    return recovered if recovered < last - event - window else None


def _with_session(run: Callable[[Any], Any]) -> Any:
    import aiohttp

    async def work() -> Any:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await run(session)

    return asyncio.run(work())


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))
