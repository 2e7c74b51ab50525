"""Keeps a number of streams open on a server while its model is replaced, and compares every token."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from paged_backend.api.request import GenerateRequest, Progress
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly
from paged_backend.engine.engine import Engine
from tests.support.in_process import WAIT, tiny_assembly
from tests.support.stress.clients import Response, connect, message_of, read
from tests.support.stress.plans import Plan
from tests.support.stress.requests import LETTERS, MODEL, StressRequest

STREAMS_PER_CONNECTION = 125
POLL_SECONDS = 0.05
TIE = 1e-5  # added to a logit
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
    other: list[tuple[int, Output]] = field(default_factory=list)  # number and output of streams with other tokens
    expected: dict[int, Output] = field(default_factory=dict)  # outputs without replacements, by number of the request
    survived: Counter[int] = field(default_factory=Counter)  # streams by the replacements during their output

    def __str__(self) -> str:
        survived = ", ".join(f"{count} streams: {number}" for number, count in sorted(self.survived.items()))
        return (
            f"{self.streams} streams, {self.tokens} tokens compared, model replaced {self.replaced} times,"
            f" ended early: {len(self.interrupted)}, with another token: {len(self.other)};"
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
            if ends_early:
                self.report.interrupted.append(f"{name}: {stream.output} instead of {expected}")
            else:
                self.report.other.append((stream.number, stream.output))


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
    clients.report = report = Report(expected=clients.expected)
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


class TieCheck:
    """Decides whether an output differs because of rounding: at the first token that differs, both tokens are so close
    that a bias of TIE on either of them makes it the sampled one. Tokens that are computed in a prompt's chunk are
    rounded differently from tokens that are computed one by one."""

    def __init__(self, engine: Engine, outputs: SimpleQueue[Any], assembly: Assembly):
        """engine: an engine that is running, and emits to `outputs`."""
        self._engine, self._outputs, self._assembly = engine, outputs, assembly
        self._keys = itertools.count()

    def is_tie(self, request: StressRequest, index: int, output: Sequence[int], expected: Sequence[int]) -> bool:
        """Return whether sample `index` of a request differs from the expected output because of rounding."""
        place = next(place for place, (one, other) in enumerate(zip(output, expected, strict=False)) if one != other)
        tokens = output[place], expected[place]
        return all(self._next(request, index, expected[:place], biased=token) == token for token in tokens)

    def _next(self, request: StressRequest, index: int, output: Sequence[int], *, biased: int) -> int:
        """Return the token after `output`."""
        limits, sampling = self._assembly.limits, {**request.sampling, "n": 1, "logit_bias": {str(biased): TIE}}
        params = SamplingParams.parse(sampling | {"max_tokens": len(output) + 1}, limits)
        prompt = self._assembly.loaded.tokenizer.encode(request.text)
        key, seed = next(self._keys), request.sampling["seed"] + index
        made = GenerateRequest.from_prompt(key, prompt, params, seed, frozenset(), limits)
        progress = Progress((tuple(output),)) if output else None
        self._engine.submit(dataclasses.replace(made, progress=progress))
        while True:
            for delta in self._outputs.get(timeout=WAIT).deltas:
                assert delta.error is None, delta.error
                return delta.token_ids[0]


@contextmanager
def tie_check(directory: Path) -> Iterator[TieCheck]:
    """Run an engine over the model of a server."""
    assembly = tiny_assembly(directory, num_gpu_blocks_override=1024, max_num_batched_tokens=8192)
    outputs: SimpleQueue[Any] = SimpleQueue()
    engine = assembly.engine(outputs.put)
    engine.start()
    try:
        yield TieCheck(engine, outputs, assembly)
    finally:
        engine.stop()


def unexplained(directory: Path, requests: Sequence[StressRequest], report: Report) -> list[tuple[int, Output]]:
    """Return the outputs with other tokens that are not explained by rounding."""
    with tie_check(directory) as check:
        return [
            (number, output)
            for number, output in report.other
            if not all(
                one == expected or check.is_tie(requests[number], index, one, expected)
                for index, (one, expected) in enumerate(zip(output, report.expected[number], strict=True))
            )
        ]
