"""Measure how fast continuations of one prompt are scored with cached log probabilities, and without.

Every continuation is a request for the log probabilities of the prompt and of itself, as in multiple-choice tests. Both
engines run with `batch_invariant`; the one without a prefix cache computes the whole prompt for each request. Each
round has another prompt, which the first request of the round computes in both engines.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest, Logprobs
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_bench import _chart
from paged_bench._engine import serve
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish, ratio
from paged_bench._workload import model_options

TARGET = 5.0  # continuations per second, relative to computing every prompt
CACHED, COMPUTED = "cached", "computed"

Scores = list[tuple[Logprobs, ...] | None]


def score(assembly: Assembly, prompts: Sequence[Sequence[int]]) -> tuple[float, Scores]:
    """Score prompts that are sent at once. Return the seconds and their log probabilities."""
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
    requests = [
        GenerateRequest.from_prompt(key, list(prompt), sampling, 0, frozenset(), assembly.limits)
        for key, prompt in enumerate(prompts)
    ]
    scores: Scores = [None] * len(prompts)
    began = time.perf_counter()
    for step in serve(assembly, requests):
        for delta in step.deltas:
            scores[delta.key] = delta.prompt_logprobs or scores[delta.key]
    return time.perf_counter() - began, scores


def draw_prompts(rnd: random.Random, vocab: int, args: Mapping[str, int]) -> list[list[int]]:
    """Return the continuations of a new prompt, each with the prompt before it."""
    tokens = range(vocab)
    prompt = rnd.choices(tokens, k=args["tokens"])
    return [prompt + rnd.choices(tokens, k=args["length"]) for _ in range(args["continuations"])]


def measure(options: Mapping[str, object], args: Mapping[str, int], rounds: int) -> list[Record]:
    """Measure both engines in alternating order."""
    engines = {
        name: assemble(EngineConfig.from_options({**options, "enable_prefix_caching": name == CACHED}))
        for name in (CACHED, COMPUTED)
    }
    vocab = engines[CACHED].limits.vocab_size
    prompts = [draw_prompts(random.Random(number), vocab, args) for number in range(rounds)]
    results: dict[str, list[Scores]] = {name: [] for name in engines}

    def contestant(name: str) -> Callable[[], float]:
        def once() -> float:
            seconds, scores = score(engines[name], prompts[len(results[name])])
            results[name].append(scores)
            return args["continuations"] / seconds

        return once

    for assembly in engines.values():  # warm-up, of which nothing is found later
        score(assembly, draw_prompts(random.Random(rounds), vocab, {**args, "continuations": 1}))
    figures = alternate({name: contestant(name) for name in engines}, rounds)
    pairs = [
        (one, other)
        for cached, computed in zip(results[CACHED], results[COMPUTED], strict=True)
        for ours, theirs in zip(cached, computed, strict=True)
        for one, other in zip(ours or (), theirs or (), strict=True)
    ]
    for assembly in engines.values():
        assembly.close()
    what = f"{args['continuations']} continuations of {args['tokens']:,} tokens"
    return [
        *(Record(f"{what}, {name}", statistics.median(values), "1/s") for name, values in figures.items()),
        ratio(f"{what}, cached / computed", figures[CACHED], figures[COMPUTED], TARGET),
        Record("log probabilities that differ", sum(one != other for one, other in pairs), f"of {len(pairs):,}", 0),
    ]


def main(argv: Sequence[str]) -> int:
    quick = {"tokens": 512, "continuations": 12, "length": 16, "rounds": 1, "max_num_seqs": 4}
    args = arguments(_parser(), argv, quick)
    blocks = (args.max_num_seqs + 2) * (2 + -(-(args.tokens + args.length) // 16))
    options = model_options(args.model) | {
        "dtype": args.dtype,
        "batch_invariant": True,
        "max_num_seqs": args.max_num_seqs,
        "num_gpu_blocks_override": blocks,
    }
    sizes = {"tokens": args.tokens, "length": args.length, "continuations": args.continuations}
    records = Records(args, measure(options, sizes, args.rounds))
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("scoring", __doc__)
    made.add_argument("--model", default="demo", help="Hugging Face model directory (default: demo)")
    made.add_argument("--dtype", default="auto", help="data type of the model (default: auto)")
    made.add_argument("--tokens", type=count, default=2048, metavar="N", help="tokens of the prompt (default: 2048)")
    made.add_argument("--length", type=count, default=16, metavar="N", help="tokens of a continuation (default: 16)")
    made.add_argument("--continuations", type=count, default=200, metavar="N", help="of a prompt (default: 200)")
    made.add_argument("--max-num-seqs", type=count, default=8, metavar="N", help="requests in a step (default: 8)")
    made.add_argument("--rounds", type=count, default=1, metavar="N", help="rounds of both engines (default: 1)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    rates = {one.name.rpartition(", ")[2]: one.value or 0.0 for one in records if one.unit == "1/s"}
    figure, (axes,) = _chart.panels(1, len(rates))
    title = f"{records[0].name.rpartition(', ')[0]}: continuations scored per second"
    _chart.bars(axes, rates, title, grey=["computed"])
    _chart.save(figure, file, caption)
