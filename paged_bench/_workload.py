"""Workloads: the requests of a benchmark, which are the same for every contestant, and the results of a run."""

from __future__ import annotations

import json
import random
import re
import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paged_bench._byte_tokenizer import byte_tokenizer_directory
from paged_client.serving.repository import resolve_model

MODELS = Path(__file__).parent / "models"  # configurations without weights
NULL = "null"  # the model that computes nothing
DATASETS = {"ShareGPT": (161, 338), "Alpaca": (19, 58)}  # mean lengths of prompt and output, in tokens
MAX_LENGTH = 1024  # tokens of a prompt or an output in these datasets


@dataclass(frozen=True)
class Job:
    """A request. Every sequence generates `output` tokens, because the end of sequence is ignored."""

    prompt: list[int]
    output: int
    arrival: float = 0.0  # seconds after the first request
    n: int = 1  # number of samples
    beams: int = 1

    @property
    def tokens(self) -> int:
        """Output tokens of all samples."""
        return self.n * self.output


@dataclass(frozen=True)
class Run:
    """The result of one pass of a contestant over the requests."""

    seconds: float
    requests: int  # number of requests that it ran: the first ones that fit into its memory
    # The time of each token of each sequence, in seconds since the arrival of its request.
    stamps: list[list[float]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)  # output tokens of the first sample of each request
    peak_slots: int = 0  # maximum number of KV cache slots in use
    peak_tokens: int = 0  # tokens in these slots
    settings: Mapping[str, str | float] = field(default_factory=dict)  # settings that the contestant has chosen


Contestant = Callable[[Sequence[Job]], Run]


def lengths(mean: float, count: int, rnd: random.Random) -> list[int]:
    """Return log-normal lengths of at most MAX_LENGTH, scaled so that their mean is `mean`."""
    values = [rnd.lognormvariate(0, 1) for _ in range(count)]
    scale = mean
    for _ in range(30):
        limited = [max(1, min(MAX_LENGTH, round(scale * one))) for one in values]
        scale *= mean / statistics.mean(limited)
    return limited


Draw = Callable[[int], list[int]]  # returns a number of random tokens


def _mixed(count: int, draw: Draw, limit: int) -> list[Job]:
    """Return mostly short and a few long requests, small enough for a CPU."""
    rnd = random.Random(0)

    def length(median: int, most: int) -> int:
        return max(4, min(most, round(rnd.lognormvariate(0, 0.8) * median)))

    return [Job(draw(length(64, 400)), length(32, 160)) for _ in range(count)]


def _even(count: int, draw: Draw, limit: int) -> list[Job]:
    """Return requests with uniformly distributed lengths: 4,609 tokens in and 3,260 out for 32 requests."""
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
    """Return requests with a shared prefix of 512 tokens and 24 further tokens each."""
    shared = draw(min(512, limit // 2))
    return [Job(shared + draw(24), 64) for _ in range(count)]


def _long(count: int, draw: Draw, limit: int) -> list[Job]:
    return [Job(draw(min(32768, limit // 2)), 128) for _ in range(max(1, count // 32))]


def _nano(count: int, draw: Draw, limit: int) -> list[Job]:
    """Return the requests of nano-vllm's benchmark: 142,827 tokens in and 133,966 out for 256 requests.

    Its prompts are drawn from the same random numbers as its lengths.
    """
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


EQUAL = re.compile(r"(\d+)x(\d+)/(\d+)")  # requests x prompt tokens / output tokens
TABLE = ("1x128/256", "16x512/256", "64x512/256", "64x2048/128", "256x512/128", "1x32000/64", "8x16000/64")


def workload_name(text: str) -> str:
    """Parse one of WORKLOADS, or requests of equal lengths, such as 16x512/256."""
    if text not in WORKLOADS and not ((found := EQUAL.fullmatch(text)) and all(map(int, found.groups()))):
        known = ", ".join(WORKLOADS)
        raise ArgumentTypeError(f"{text!r}: must be one of {known}, or REQUESTSxPROMPT/OUTPUT, such as {TABLE[1]}")
    return text


def _equal(name: str, draw: Draw) -> list[Job] | None:
    """Return the requests of a name such as 16x512/256, and None for another name."""
    found = EQUAL.fullmatch(name)
    if found is None:
        return None
    count, prompt, output = map(int, found.groups())
    return [Job(draw(prompt), output) for _ in range(count)]


def workload(name: str, count: int, vocab_size: int, limit: int, rate: float | None = None) -> list[Job]:
    """Return the requests of a workload, shortened to fit into a model of `limit` positions.

    Args:
        name: one of WORKLOADS, or one that `workload_name` accepts.
        count: number of requests; "long" has a 32nd of it, and a name such as 16x512/256 its own.
        rate: requests per second of a Poisson process; None if all arrive at once.
    """
    rnd = random.Random(1)

    def draw(length: int) -> list[int]:
        return [rnd.randrange(vocab_size) for _ in range(length)]

    jobs = [_fit(job, limit) for job in _equal(name, draw) or WORKLOADS[name](count, draw, limit)]
    if rate is None:
        return jobs
    now, timed = 0.0, []
    for job in jobs:
        timed.append(replace(job, arrival=now))
        now += rnd.expovariate(rate)
    return timed


def blocks_for(names: Sequence[str], count: int) -> int | None:
    """Return a number of blocks of 16 tokens that is enough for workloads of `count` requests, None for "long"."""
    if "long" in names:  # one prompt may be longer than all others together
        return None
    equal = [tuple(map(int, found.groups())) for found in map(EQUAL.fullmatch, names) if found]
    usual = 35 * count * (4 if {"n4", "beam4"} & set(names) else 1)
    return max([usual, *(requests * -(-(prompt + output + 16) // 16) for requests, prompt, output in equal)])


def _fit(job: Job, limit: int) -> Job:
    prompt = job.prompt[: max(1, limit * 3 // 4, limit - job.output)]
    return replace(job, prompt=prompt, output=min(job.output, limit - len(prompt)))


def model_options(model: str) -> dict[str, Any]:
    """Return engine options for a model: a directory or 'demo', or one of MODELS with random weights.

    Only those of MODELS other than NULL work without the demo model: their text is never compared.
    """
    own = {"model": str(MODELS / model), "load_format": "dummy"}
    if model == NULL:
        return own | {"tokenizer": resolve_model("demo"), "trust_remote_code": True}
    if model in model_names():
        vocab_size = json.loads((MODELS / model / "config.json").read_text())["vocab_size"]
        return own | {"tokenizer": str(byte_tokenizer_directory(vocab_size))}
    return {"model": resolve_model(model)}


def model_names() -> Sequence[str]:
    return sorted(directory.name for directory in MODELS.iterdir() if directory.name != NULL)
