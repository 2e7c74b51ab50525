"""Measure speculative decoding: output tokens per second and per step, and the acceptance rate of draft tokens.

There are two kinds of requests: to repeat a text, where the output is part of the prompt, and to continue a text, where
it is not. The texts are from this project. All contestants generate the same tokens, which is checked in float32.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paged_backend.engine.assembly import Assembly
from paged_bench._engine import greedy, load, serve
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, count, figures, model_option, rounds_option
from paged_bench.kv_dtype import windows
from paged_client.serving.repository import resolve_model

REPEAT, GO_ON = "repeating a text", "going on with one"
NONE = "none"  # the contestant without draft tokens


@dataclass(frozen=True)
class Decoded:
    """A run of requests at once."""

    rate: float  # output tokens per second after the prefill of all requests
    outputs: list[list[int]]
    rows: int  # number of decoding sequences, summed over all steps
    draft_tokens: int
    accepted: int

    @property
    def tokens(self) -> int:
        """Decoded tokens."""
        return sum(len(output) - 1 for output in self.outputs)


def make_prompts(assembly: Assembly, count: int, length: int) -> dict[str, list[list[int]]]:
    """Return `count` prompts of both kinds, from texts of `length` tokens."""
    tokenizer = assembly.loaded.tokenizer
    texts = windows(assembly, count, length)
    repeat = []
    for text in texts:
        words = [{"role": "user", "content": f"Repeat this text word for word:\n\n{tokenizer.decode(text)}"}]
        repeat.append(tokenizer.encode(_conversation(tokenizer, words), add_special_tokens=False))
    return {REPEAT: repeat, GO_ON: texts}


def _conversation(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if not tokenizer.chat_template:
        return str(messages[0]["content"])
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def run(assembly: Assembly, prompts: Sequence[Sequence[int]], output: int) -> Decoded:
    outputs: list[list[int]] = [[] for _ in prompts]
    before, rows, decoded, begin, end = assembly.scheduler.stats, 0, 0, 0.0, 0.0
    for step in serve(assembly, greedy(assembly, prompts, output)):
        for delta in step.deltas:
            if outputs[delta.key]:
                decoded += len(delta.token_ids)
                rows += 1
            outputs[delta.key] += delta.token_ids
        if not begin and all(outputs):
            begin, decoded = time.perf_counter(), 0
        end = time.perf_counter()
    after = assembly.scheduler.stats
    drafted, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    return Decoded(decoded / (end - begin), outputs, rows, drafted, accepted)


def compare(kind: str, engines: Mapping[str, Assembly], prompts: list[list[int]], args: Namespace) -> Iterator[Record]:
    contestants = {name: partial(run, engine, prompts, args.output) for name, engine in engines.items()}
    contest = alternate(contestants, args.rounds, lambda run: run.rate)
    if engines[NONE].loaded.spec.dtype == torch.float32:
        expected = contest.runs[NONE][-1].outputs
        assert all(runs[-1].outputs == expected for runs in contest.runs.values()), "speculation has changed a token"
    medians = contest.medians
    yield Record(f"{kind}: output_throughput", medians[NONE], "tokens/s", peers=medians)
    for name, runs in contest.runs.items():
        if name == NONE:
            continue
        drafted, accepted = sum(run.draft_tokens for run in runs), sum(run.accepted for run in runs)
        per_step = sum(run.tokens for run in runs) / sum(run.rows for run in runs)
        yield contest.ratio(f"{kind}: throughput_ratio ({name})", name, NONE)
        yield Record(f"{kind}: accepted ({name})", 100 * accepted / max(1, drafted), "%", limit=100.0)
        yield Record(f"{kind}: tokens_per_step ({name})", per_step, "tokens", peers={NONE: 1.0})


def measure(args: Namespace) -> Iterator[Record]:
    options = {
        "model": resolve_model(args.model),
        "dtype": args.dtype,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": args.requests * (2 * args.length + args.output) // 8,
    }
    settings: dict[str, dict[str, object]] = {NONE: {}}
    for number in args.draft_tokens:
        settings[f"prompt lookup, {number}"] = {"num_speculative_tokens": number}
    for number in args.draft_tokens if args.draft else ():
        settings[f"draft model, {number}"] = {"num_speculative_tokens": number, "speculative_model": args.draft}
    engines = {name: load(options | own) for name, own in settings.items()}
    for kind, prompts in make_prompts(engines[NONE], args.requests, args.length).items():
        yield from compare(kind, engines, prompts, args)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    for kind in (REPEAT, GO_ON):
        medians = next((record.peers for record in records if record.name == f"{kind}: output_throughput"), {})
        accepted = figures(records, rf"{kind}: accepted \((.*)\)")
        labels = [f"{value:.3g}" + (f", {accepted[name]:.0f}% right" if name in accepted else "")
                  for name, value in medians.items()]  # fmt: skip
        yield Bars(f"{kind}, output tokens/s", medians, grey=[NONE], labels=labels)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--draft", "draft model with the same vocabulary, measured in addition to prompt lookup", metavar="DIR"),
        Option("--dtype", "data type of weights and KV cache", "float32"),
        Option("--requests", "number of concurrent requests", 4),
        Option("--length", "tokens of each text", 96),
        Option("--output", "output tokens of each request", 96),
        Option("--draft-tokens", "numbers of draft tokens per step", [2, 4, 8], type=count, nargs="+"),
        rounds_option(3),
    ),
    quick={"requests": 2, "length": 64, "output": 24, "draft_tokens": [4], "rounds": 1},
)
