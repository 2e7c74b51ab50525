"""Measure how fast continuations of one prompt are scored with cached log probabilities, and without.

Every continuation is a request for the log probabilities of the prompt and of itself, as in multiple-choice tests. Both
engines run with `batch_invariant`; the one without a prefix cache computes the whole prompt for each request. Each
round has another prompt, which the first request of the round computes in both engines.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paged_backend.api.token_outputs import Logprobs
from paged_backend.engine.assembly import Assembly
from paged_bench._engine import greedy, load, model_options, serve
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, figures, model_option, rounds_option

TARGET = 5.0  # continuations per second, relative to computing every prompt
CACHED, COMPUTED = "cached", "computed"


@dataclass(frozen=True)
class Scores:
    """The log probabilities of prompts that were sent at once."""

    seconds: float
    logprobs: list[tuple[Logprobs, ...]]


def score(assembly: Assembly, prompts: Sequence[Sequence[int]]) -> Scores:
    """Score prompts that are sent at once."""
    logprobs: list[tuple[Logprobs, ...]] = [()] * len(prompts)
    began = time.perf_counter()
    for step in serve(assembly, greedy(assembly, prompts, 0, prompt_logprobs=0)):
        for delta in step.deltas:
            logprobs[delta.key] = tuple((delta.prompt_values or {}).get("logprobs", logprobs[delta.key]))
    return Scores(time.perf_counter() - began, logprobs)


def draw_prompts(seed: int, vocab: int, tokens: int, length: int, continuations: int) -> list[list[int]]:
    """Return the continuations of a new prompt, each with the prompt before it."""
    rnd = random.Random(seed)
    prompt = rnd.choices(range(vocab), k=tokens)
    return [prompt + rnd.choices(range(vocab), k=length) for _ in range(continuations)]


def measure(args: Namespace) -> Iterator[Record]:
    options = model_options(args.model) | {"dtype": args.dtype, "batch_invariant": True}
    blocks = (args.max_num_seqs + 2) * (2 + -(-(args.tokens + args.length) // 16))
    options |= {"max_num_seqs": args.max_num_seqs, "num_gpu_blocks_override": blocks}
    engines = {name: load({**options, "enable_prefix_caching": name == CACHED}) for name in (CACHED, COMPUTED)}
    vocab = engines[CACHED].limits.vocab_size
    for assembly in engines.values():  # warm-up with prompts that do not occur later
        score(assembly, draw_prompts(args.rounds, vocab, args.tokens, args.length, 1))

    def contestant(assembly: Assembly) -> Callable[[], Scores]:
        prompts = (
            draw_prompts(number, vocab, args.tokens, args.length, args.continuations) for number in range(args.rounds)
        )
        return lambda: score(assembly, next(prompts))

    contestants = {name: contestant(assembly) for name, assembly in engines.items()}
    contest = alternate(contestants, args.rounds, lambda run: args.continuations / run.seconds)
    for assembly in engines.values():
        assembly.close()
    what = f"{args.continuations} continuations of {args.tokens:,} tokens"
    yield from contest.records(f"{what}, {{}}", "1/s")
    yield contest.ratio(f"{what}, cached / computed", CACHED, COMPUTED, TARGET)
    found, expected = (
        [logprobs for run in contest.runs[name] for row in run.logprobs for logprobs in row] for name in engines
    )
    differing = sum(logprobs != other for logprobs, other in zip(found, expected, strict=True))
    yield Record("log probabilities that differ", differing, f"of {len(found):,}", 0)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    title = f"{records[0].name.rpartition(', ')[0]}: continuations scored per second"
    yield Bars(title, figures(records, f".*, ({CACHED}|{COMPUTED})"), grey=[COMPUTED])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--dtype", "data type of the model", "auto"),
        Option("--tokens", "tokens of the prompt", 2048),
        Option("--length", "tokens of a continuation", 16),
        Option("--continuations", "continuations of a prompt", 200),
        Option("--max-num-seqs", "requests in a step", 8),
        rounds_option(1),
    ),
    quick={"tokens": 512, "continuations": 12, "length": 16, "max_num_seqs": 4},
)
