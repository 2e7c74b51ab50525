"""What benchmarks ask of an engine, the same for every contestant, and what they get: prompts, outputs, arrivals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from client.serving.repository import resolve_model

MODELS = Path(__file__).parent / "models"  # configurations without weights
NULL = "null"  # of them the one that computes nothing
DATASETS = {"ShareGPT": (161, 338), "Alpaca": (19, 58)}  # mean tokens of prompt and output
LONGEST = 1024  # tokens of a prompt or an output


@dataclass(frozen=True)
class Job:
    """One request. Every sequence of it has `output` tokens: the end of sequence is ignored."""

    prompt: list[int]
    output: int
    arrival: float = 0.0  # seconds after the first
    n: int = 1  # samples
    beams: int = 1

    @property
    def tokens(self) -> int:
        """That its client gets."""
        return self.n * self.output


@dataclass(frozen=True)
class Run:
    """One contestant's pass over the requests."""

    seconds: float
    requests: int  # that it served: of the first ones, as many as it has memory for
    stamps: list[list[float]] = field(default_factory=list)  # of each sequence's tokens, seconds from its arrival
    outputs: list[list[int]] = field(default_factory=list)  # tokens of each request's first sample
    peak_slots: int = 0  # key/value slots held at once at the most
    peak_tokens: int = 0  # tokens that were in them
    settings: Mapping[str, str | float] = field(default_factory=dict)  # what was chosen for it


Contestant = Callable[[Sequence[Job]], Run]


def lengths(mean: float, count: int, rnd: random.Random) -> list[int]:
    """Log-normal, cut at LONGEST, and scaled so that the mean holds after the cut."""
    drawn = [rnd.lognormvariate(0, 1) for _ in range(count)]
    scale = mean
    for _ in range(30):
        cut = [max(1, min(LONGEST, round(scale * one))) for one in drawn]
        scale *= mean / statistics.mean(cut)
    return cut


Draw = Callable[[int], list[int]]  # so many tokens


def _mixed(count: int, draw: Draw, limit: int) -> list[Job]:
    """Most of them short and a few long, as people's requests are; small enough for a CPU."""
    rnd = random.Random(0)

    def length(median: int, most: int) -> int:
        return max(4, min(most, round(rnd.lognormvariate(0, 0.8) * median)))

    return [Job(draw(length(64, 400)), length(32, 160)) for _ in range(count)]


def _even(count: int, draw: Draw, limit: int) -> list[Job]:
    """Any length as likely as another: with 32 requests 4,609 tokens in and 3,260 out."""
    rnd = random.Random(158)
    return [Job(draw(rnd.randint(32, 255)), rnd.randint(16, 191)) for _ in range(count)]


def _dataset(name: str, **sampling: int) -> Callable[[int, Draw, int], list[Job]]:
    def jobs(count: int, draw: Draw, limit: int) -> list[Job]:
        rnd = random.Random(0)
        prompts, outputs = (lengths(mean, count, rnd) for mean in DATASETS[name])
        rnd.shuffle(outputs)
        return [Job(draw(prompt), output, **sampling) for prompt, output in zip(prompts, outputs, strict=True)]

    return jobs


def _system_prompt(count: int, draw: Draw, limit: int) -> list[Job]:
    """A prompt of 512 tokens that all share, and 24 of their own."""
    shared = draw(min(512, limit // 2))
    return [Job(shared + draw(24), 64) for _ in range(count)]


def _long(count: int, draw: Draw, limit: int) -> list[Job]:
    return [Job(draw(min(32768, limit // 2)), 128) for _ in range(max(1, count // 32))]


def _nano(count: int, draw: Draw, limit: int) -> list[Job]:
    """nano-vllm's benchmark: with 256 requests 142,827 tokens in and 133,966 out. Its prompts are drawn in between."""
    rnd = random.Random(0)
    prompts = []
    for _ in range(count):
        length = rnd.randint(100, 1024)
        for _ in range(length):
            rnd.randint(0, 10000)
        prompts.append(length)
    return [Job(draw(prompt), rnd.randint(100, 1024)) for prompt in prompts]


WORKLOADS = {
    "mixed": _mixed,
    "even": _even,
    "sharegpt": _dataset("ShareGPT"),
    "alpaca": _dataset("Alpaca"),
    "system-prompt": _system_prompt,
    "n4": _dataset("ShareGPT", n=4),
    "beam4": _dataset("Alpaca", beams=4),
    "long": _long,
    "nano": _nano,
}


def workload(name: str, count: int, vocab_size: int, limit: int, rate: float | None = None) -> list[Job]:
    """`count` requests (a 32nd of them where contexts are long), shortened to a model of `limit` positions. With a
    `rate`, in requests a second, they arrive as a Poisson process; else all at once."""
    rnd = random.Random(1)
    jobs = WORKLOADS[name](count, lambda length: [rnd.randrange(vocab_size) for _ in range(length)], limit)
    jobs = [_fit(job, limit) for job in jobs]
    if rate is None:
        return jobs
    now, timed = 0.0, []
    for job in jobs:
        timed.append(replace(job, arrival=now))
        now += rnd.expovariate(rate)
    return timed


def _fit(job: Job, limit: int) -> Job:
    prompt = job.prompt[: max(1, limit * 3 // 4)]
    return replace(job, prompt=prompt, output=min(job.output, limit - len(prompt)))


def model_options(model: str) -> dict[str, Any]:
    """Engine options for a model: a directory or 'demo', or one of MODELS, whose weights are drawn at random."""
    if model in (*model_names(), NULL):
        own = {"model": str(MODELS / model), "tokenizer": resolve_model("demo"), "load_format": "dummy"}
        return own | ({"trust_remote_code": True} if model == NULL else {})
    return {"model": resolve_model(model)}


def model_names() -> Sequence[str]:
    return sorted(directory.name for directory in MODELS.iterdir() if directory.name != NULL)
