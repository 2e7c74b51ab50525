"""Measure speculative decoding: output tokens per second and per step, and the acceptance rate of draft tokens.

There are two kinds of requests: to repeat a text, where the output is part of the prompt, and to continue one, where it
is not. The texts are those of this project. All contestants generate the same tokens, which is checked in float32.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_bench._engine import serve
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish, ratio
from paged_bench.kv_dtype import windows
from paged_client.serving.repository import resolve_model

REPEAT, GO_ON = "repeating a text", "going on with one"


@dataclass
class Counts:
    """Sums over all rounds of one contestant."""

    tokens: int = 0
    rows: int = 0  # number of decoding sequences, summed over all steps
    draft_tokens: int = 0
    accepted: int = 0


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


def run(
    assembly: Assembly, prompts: Sequence[Sequence[int]], output: int, counts: Counts
) -> tuple[float, list[list[int]]]:
    """Return the output tokens per second after the prefill of all requests, and the tokens."""
    requests = [
        GenerateRequest.from_prompt(
            key, list(one), SamplingParams(max_tokens=output, temperature=0), 0, frozenset(), assembly.limits
        )
        for key, one in enumerate(prompts)
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    before, decoded, begin, end = assembly.scheduler.stats, 0, 0.0, 0.0
    for step in serve(assembly, requests):
        for delta in step.deltas:
            if outputs[delta.key]:
                decoded += len(delta.token_ids)
                counts.rows += 1
            outputs[delta.key] += delta.token_ids
        if not begin and all(outputs):
            begin, decoded = time.perf_counter(), 0
        end = time.perf_counter()
    after = assembly.scheduler.stats
    counts.tokens += sum(len(one) - 1 for one in outputs)
    counts.draft_tokens += after.draft_tokens - before.draft_tokens
    counts.accepted += after.accepted_tokens - before.accepted_tokens
    return decoded / (end - begin), outputs


def main(argv: Sequence[str]) -> int:
    quick = {"requests": 2, "length": 64, "output": 24, "draft_tokens": [4], "rounds": 1}
    args = arguments(_parser(), argv, quick)
    model = resolve_model(args.model)
    options = {"model": model, "dtype": args.dtype, "max_num_seqs": args.requests, "max_num_batched_tokens": 512}
    options |= {
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": args.requests * (2 * args.length + args.output) // 8,
    }
    settings: dict[str, dict[str, object]] = {"none": {}}
    for number in args.draft_tokens:
        settings[f"prompt lookup, {number}"] = {"num_speculative_tokens": number}
    if args.draft:
        for number in args.draft_tokens:
            settings[f"draft model, {number}"] = {"num_speculative_tokens": number, "speculative_model": args.draft}
    assemblies = {name: assemble(EngineConfig.from_options(options | more)) for name, more in settings.items()}
    records = Records(args)
    for kind, prompts in make_prompts(assemblies["none"], args.requests, args.length).items():
        records += _compare(kind, assemblies, prompts, args.output, args.rounds)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _compare(
    kind: str, assemblies: dict[str, Assembly], prompts: list[list[int]], output: int, rounds: int
) -> list[Record]:
    counts = {name: Counts() for name in assemblies}
    outputs: dict[str, list[list[int]]] = {}

    def contestant(name: str) -> Callable[[], float]:
        def once() -> float:
            rate, outputs[name] = run(assemblies[name], prompts, output, counts[name])
            return rate

        return once

    figures = alternate({name: contestant(name) for name in assemblies}, rounds)
    if assemblies["none"].loaded.spec.dtype == torch.float32:
        assert all(one == outputs["none"] for one in outputs.values()), "speculative decoding has changed a token"
    return _records(kind, figures, counts)


def _records(kind: str, figures: dict[str, list[float]], counts: dict[str, Counts]) -> list[Record]:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    records = [Record(f"{kind}: output_throughput", medians["none"], "tokens/s", peers=medians)]
    for name, one in counts.items():
        if name == "none":
            continue
        records += [
            ratio(f"{kind}: throughput_ratio ({name})", figures[name], figures["none"]),
            Record(f"{kind}: accepted ({name})", 100 * one.accepted / max(1, one.draft_tokens), "%", limit=100.0),
            Record(f"{kind}: tokens_per_step ({name})", one.tokens / one.rows, "tokens", peers={"none": 1.0}),
        ]
    return records


def _parser() -> ArgumentParser:
    made = parser("speculation", __doc__)
    add = made.add_argument
    add("--model", default="demo", help="Hugging Face model directory (default: demo)")
    add("--draft", metavar="DIR", help="draft model with the same vocabulary, measured in addition to prompt lookup")
    add("--dtype", default="float32", help="data type of weights and KV cache (default: float32)")
    add("--requests", type=count, default=4, metavar="N", help="number of concurrent requests (default: 4)")
    add("--length", type=count, default=96, metavar="N", help="tokens of each text (default: 96)")
    add("--output", type=count, default=96, metavar="N", help="output tokens of each request (default: 96)")
    add(
        "--draft-tokens",
        "--guesses",
        type=count,
        nargs="+",
        default=[2, 4, 8],
        metavar="N",
        help="numbers of draft tokens per step (default: 2 4 8); --guesses is an older name",
    )
    add("--rounds", type=count, default=3, metavar="N", help="number of rounds (default: 3)")
    return made


def draw(records: list[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharex=True), (REPEAT, GO_ON), strict=True):
        medians = next(one.peers for one in records if one.name == f"{kind}: output_throughput")
        names = list(medians)[::-1]
        bars = axes.barh(names, [medians[name] for name in names], color=["#76b900"] * (len(names) - 1) + ["#b0b0b0"])
        accepted = {one.name: one.value for one in records}
        rates = [accepted.get(f"{kind}: accepted ({name})") for name in names]
        axes.bar_label(
            bars, [f"{rate:.0f}% right" if rate is not None else "" for rate in rates], padding=3, fontsize=8
        )
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("output tokens per second, median")
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.06, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
