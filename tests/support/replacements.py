"""Keeps a number of streams open on a server while its model is replaced, and compares every token."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.stress.clients import Response, connect, message_of, read
from tests.support.stress.plans import Plan
from tests.support.stress.requests import LETTERS, MODEL, StressRequest

STREAMS_PER_CONNECTION = 125
POLL_SECONDS = 0.05
KINDS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1, "n": 2},
    {"temperature": 1, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1, "logprobs": 1, "stop": ["aQz"]},
)


def distinct_requests(count: int, *, output: tuple[int, int], seed: int) -> list[StressRequest]:
    """Return requests with different prompts, of every kind. output: minimum and maximum number of tokens."""
    generator, made = random.Random(seed), []
    for index in range(count):
        sampling = KINDS[index % len(KINDS)] | {"max_tokens": generator.randint(*output), "seed": index}
        text = "".join(generator.choices(LETTERS, k=generator.randint(8, 40)))
        made.append(StressRequest(text, sampling | {"ignore_eos": True}))
    return made


Output = list[list[int]]  # tokens of each sample


@dataclass
class Report:
    """What the clients have seen."""

    streams: int = 0  # streams that have ended
    tokens: int = 0  # tokens that were compared
    replaced: int = 0
    interrupted: list[str] = field(default_factory=list)  # streams that ended with an error, or early
    wrong: list[str] = field(default_factory=list)  # streams with another token than without replacements
    survived: Counter[int] = field(default_factory=Counter)  # streams by the replacements during their output

    def __str__(self) -> str:
        survived = ", ".join(f"{count} streams: {number}" for number, count in sorted(self.survived.items()))
        return (
            f"{self.streams} streams, {self.tokens} tokens compared, model replaced {self.replaced} times,"
            f" ended early: {len(self.interrupted)}, with a wrong token: {len(self.wrong)};"
            f" replacements during the output of {survived}"
        )


@dataclass(eq=False)
class _Stream:
    number: int  # of its request
    output: Output
    began_at: int  # replacements before it
    ended: asyncio.Future[None]


class Clients:
    """Streams over a few gRPC connections."""

    def __init__(self, url: str, requests: Sequence[StressRequest], model: str):
        self._url, self._requests, self._model = url, requests, model
        self._ids = itertools.count()
        self._open: dict[str, _Stream] = {}  # by request id
        self._calls: list[tuple[Any, Any, asyncio.Future[None]]] = []
        self._writing = asyncio.Lock()  # a connection takes one request at a time
        self.report = Report()
        self.expected: dict[int, Output] = {}  # by number of the request: the first output

    @property
    def num_started(self) -> int:
        """The number of open streams that have begun to answer."""
        return sum(any(stream.output) for stream in self._open.values())

    async def run(self, number: int) -> None:
        """Open a stream, and wait for its end."""
        place = number // STREAMS_PER_CONNECTION
        while len(self._calls) <= place:
            channel = connect(self._url)
            call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
            self._calls.append((channel, call, asyncio.ensure_future(self._listen(call))))
        request, name = self._requests[number], f"stream-{next(self._ids)}"
        output: Output = [[] for _ in range(request.sampling.get("n", 1))]
        ended = asyncio.get_running_loop().create_future()
        self._open[name] = _Stream(number, output, self.report.replaced, ended)
        async with self._writing:
            await self._calls[place][1].write(message_of(Plan(name, "grpc", request), self._model))
        await ended

    async def close(self) -> None:
        for _, call, listener in self._calls:
            await call.done_writing()
            await listener
        for channel, _, _ in self._calls:
            await channel.close()

    async def _listen(self, call: Any) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            self._add(reply.infer_response.id, read(reply))

    def _add(self, name: str, response: Response) -> None:
        stream = self._open.get(name)
        if stream is None:
            return
        for tokens, new in zip(stream.output, response.tokens, strict=False):
            tokens += new
        if response.error is not None:
            self.report.interrupted.append(f"{name}: {response.error}")
        elif response.finish:
            self._compare(name, stream)
        else:
            return
        del self._open[name]
        self.report.streams += 1
        self.report.survived[self.report.replaced - stream.began_at] += 1
        stream.ended.set_result(None)

    def _compare(self, name: str, stream: _Stream) -> None:
        expected = self.expected.setdefault(stream.number, stream.output)
        self.report.tokens += sum(map(len, stream.output))
        if stream.output != expected:
            ends_early = all(one == whole[: len(one)] for one, whole in zip(stream.output, expected, strict=True))
            found = self.report.interrupted if ends_early else self.report.wrong
            found.append(f"{name}: {stream.output} instead of {expected}")


async def replace_under_load(
    url: str,
    requests: Sequence[StressRequest],
    replace: Callable[[], None],
    *,
    replacements: int,
    model: str = MODEL,
    say: Callable[[str], None] = print,
) -> Report:
    """Run all requests once; then keep as many streams open while the model is replaced, and let them end.

    replace: replaces the model, and returns when the new instance serves.
    """
    clients = Clients(url, requests, model)
    await asyncio.gather(*(clients.run(number) for number in range(len(requests))))
    assert not clients.report.interrupted, clients.report.interrupted[0]
    say(f"{len(requests)} streams without replacements, {clients.report.tokens} tokens")
    clients.report = report = Report()
    done = False

    async def run_again(number: int) -> None:
        while not done:
            await clients.run(number)

    everybody = [asyncio.ensure_future(run_again(number)) for number in range(len(requests))]
    for _ in range(replacements):
        while clients.num_started < len(requests) - len(requests) // 50:  # some begin while others end
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(replace)
        report.replaced += 1
        say(str(report))
    done = True
    await asyncio.gather(*everybody)
    await clients.close()
    return report
