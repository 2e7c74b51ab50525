"""The engine without a server: models, the requests of a workload, and runs of them.

The requests are the same for every contestant, and so is the form of their results (`Run`).
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.engine.outputs import EngineDied, EngineOutput, StepOutput
from paged_bench._harness import Option, Record, latencies, model_option
from paged_client.serving.repository import resolve_model
from paged_client.serving.server_files import cache_directory, create_atomically

OURS = "paged"
MODELS = Path(__file__).parent / "models"  # configurations without weights
NULL = "null"  # the model that computes nothing
DATASETS = {"ShareGPT": (161, 338), "Alpaca": (19, 58)}  # mean lengths of prompt and output, in tokens
MAX_LENGTH = 1024  # tokens of a prompt or an output in these datasets
WORDS = (
    "the a of to and in that it was for on with as his her they at be this from had not are but by we you one all were"
).split()
END = "<|end|>"  # end of sequence of the byte tokenizer


# --- requests and runs ---------------------------------------------------------------------------------------------


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

    def rate(self, jobs: Sequence[Job]) -> float:
        """Return output tokens per second. jobs: the requests of the run."""
        return sum(job.tokens for job in jobs[: self.requests]) / self.seconds


Contestant = Callable[[Sequence[Job]], Run]


def run_latencies(what: str, runs: Sequence[Run]) -> Iterator[Record]:
    """Yield time to first token and time between tokens, p50 and p99 over all sequences of all rounds."""
    stamps = [times for run in runs for times in run.stamps if times]
    first = [times[0] for times in stamps]
    yield from latencies(what, {"time to first token": first, "time between tokens": between(stamps)})


def between(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Return the times between two tokens or responses of the same sequence."""
    return [later - earlier for times in stamps for earlier, later in itertools.pairwise(times)]


def permute_tokens(seed: int, jobs: Sequence[Job], vocab_size: int) -> list[Job]:
    """Replace every token by another, the same in all requests, which keeps shared prefixes shared."""
    other = list(range(vocab_size))
    random.Random(seed).shuffle(other)
    return [replace(job, prompt=[other[token] for token in job.prompt]) for job in jobs]


# --- workloads -----------------------------------------------------------------------------------------------------


def lengths(mean: float, count: int, rnd: random.Random) -> list[int]:
    """Return log-normal lengths of at most MAX_LENGTH, scaled so that their mean is `mean`."""
    values = [rnd.lognormvariate(0, 1) for _ in range(count)]
    scale = mean
    for _ in range(30):
        limited = [max(1, min(MAX_LENGTH, round(scale * value))) for value in values]
        scale *= mean / statistics.mean(limited)
    return limited


Draw = Callable[[int], list[int]]  # returns that many random tokens


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
    if text not in WORKLOADS and not ((match := EQUAL.fullmatch(text)) and all(map(int, match.groups()))):
        known = ", ".join(WORKLOADS)
        raise ArgumentTypeError(f"{text!r}: must be one of {known}, or REQUESTSxPROMPT/OUTPUT, such as {TABLE[1]}")
    return text


def _equal(name: str, draw: Draw) -> list[Job] | None:
    """Return the requests of a name such as 16x512/256, and None for another name."""
    match = EQUAL.fullmatch(name)
    if match is None:
        return None
    count, prompt, output = map(int, match.groups())
    return [Job(draw(prompt), output) for _ in range(count)]


def workload(name: str, count: int, vocab_size: int, limit: int, rate: float | None = None) -> list[Job]:
    """Return the requests of a workload, shortened to fit into a model of `limit` positions.

    Args:
        name: one of WORKLOADS, or a name that `workload_name` accepts.
        count: number of requests; "long" has a 32nd of it, and a name such as 16x512/256 gives its own number.
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
    equal = [tuple(map(int, match.groups())) for match in map(EQUAL.fullmatch, names) if match]
    usual = 35 * count * (4 if {"n4", "beam4"} & set(names) else 1)
    return max([usual, *(requests * -(-(prompt + output + 16) // 16) for requests, prompt, output in equal)])


def _fit(job: Job, limit: int) -> Job:
    prompt = job.prompt[: max(1, limit * 3 // 4, limit - job.output)]
    return replace(job, prompt=prompt, output=min(job.output, limit - len(prompt)))


# --- models --------------------------------------------------------------------------------------------------------


def model_options(model: str) -> dict[str, Any]:
    """Return engine options for a model: a directory or 'demo', or one of MODELS with random weights.

    Without the demo model only MODELS other than NULL work: their text is never compared.
    """
    own = {"model": str(MODELS / model), "load_format": "dummy"}
    if model == NULL:
        return own | {"tokenizer": resolve_model("demo"), "trust_remote_code": True}
    if model in model_names():
        vocab_size = json.loads((MODELS / model / "config.json").read_text())["vocab_size"]
        return own | {"tokenizer": str(_byte_tokenizer_directory(vocab_size))}
    return {"model": resolve_model(model)}


def model_names() -> Sequence[str]:
    return sorted(directory.name for directory in MODELS.iterdir() if directory.name != NULL)


def shape_option(default: str | None = "demo", *further: str) -> Option:
    """Return the option for a model that may have random weights. further: models beside `model_names`.

    default: None for the demo model on a CPU and Qwen3-0.6B on a GPU.
    """
    shapes = ", ".join([*further, *model_names()])
    text = f"Hugging Face model directory, 'demo', or a shape with random weights: {shapes}"
    return model_option(default, text if default else f"{text} (default: demo on a CPU, Qwen3-0.6B on a GPU)")


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, at least 257: the bytes, the end of sequence, and numbers.

    A text becomes bytes only. The numbers give the other tokens of a model a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    names = [*alphabet, END, *(f"{space}{index}" for index in range(len(alphabet) + 1, vocab_size))]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def _byte_tokenizer_directory(vocab_size: int) -> Path:
    """Return a directory with the files of `byte_tokenizer`, which is created in the cache if it is missing."""
    directory = cache_directory() / "models" / f"byte-tokenizer-{vocab_size}"
    if not directory.is_dir():
        create_atomically(directory, byte_tokenizer(vocab_size).save_pretrained)
    return directory


# --- the engine ----------------------------------------------------------------------------------------------------


def load(options: Mapping[str, Any]) -> Assembly:
    """Return an engine with these options."""
    return assemble(EngineConfig.from_options(options))


def greedy(
    assembly: Assembly, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any
) -> list[GenerateRequest]:
    """Return greedy requests. sampling: further sampling parameters."""
    parameters = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling})
    return [
        GenerateRequest.from_prompt(key, list(prompt), parameters, key, frozenset(), assembly.limits)
        for key, prompt in enumerate(prompts)
    ]


class RunningEngine:
    """An engine on its own thread, as in the server."""

    def __init__(self, assembly: Assembly) -> None:
        """Start the engine."""
        self.assembly = assembly
        self._outputs: SimpleQueue[EngineOutput] = SimpleQueue()
        self._engine = assembly.engine(self._outputs.put)
        self._engine.start()

    def steps(
        self, requests: Sequence[GenerateRequest], arrivals: Sequence[float] | None = None
    ) -> Iterator[StepOutput]:
        """Run requests and yield the output of every step until all have finished. Raises RuntimeError if the engine or
        a request fails.

        Args:
            arrivals: when to submit each request, in seconds; None submits all at once.
        """
        if arrivals is None:
            for request in requests:
                self._engine.submit(request)
        else:
            threading.Thread(target=self._submit, args=(requests, arrivals), daemon=True).start()
        unfinished = sum(request.sampling.n for request in requests)
        while unfinished:
            output = self.next_step()
            for delta in output.deltas:
                if delta.error:
                    raise RuntimeError(str(delta.error))
                unfinished -= delta.last
            yield output

    def next_step(self) -> StepOutput:
        """Return the output of the next step. Raises RuntimeError if the engine fails."""
        output = self._outputs.get()
        if isinstance(output, EngineDied):
            raise RuntimeError(output.reason)
        assert isinstance(output, StepOutput)
        return output

    def stop(self) -> None:
        self._engine.stop()

    def _submit(self, requests: Sequence[GenerateRequest], arrivals: Sequence[float]) -> None:
        started = time.monotonic()
        for request, arrival in zip(requests, arrivals, strict=True):
            time.sleep(max(0.0, started + arrival - time.monotonic()))
            self._engine.submit(request)


def serve(
    assembly: Assembly, requests: Sequence[GenerateRequest], arrivals: Sequence[float] | None = None
) -> Iterator[StepOutput]:
    """Yield the `steps` of an engine that runs only these requests."""
    engine = RunningEngine(assembly)
    yield from engine.steps(requests, arrivals)
    engine.stop()


def _requests_of(jobs: Sequence[Job], assembly: Assembly) -> list[GenerateRequest]:
    requests = []
    for key, job in enumerate(jobs):
        temperature = 1.0 if job.n > 1 or job.beams > 1 else 0.0
        sampling = SamplingParams(
            max_tokens=job.output, temperature=temperature, n=job.n, beam_width=job.beams, ignore_eos=True
        )
        requests.append(GenerateRequest.from_prompt(key, job.prompt, sampling, key, frozenset(), assembly.limits))
    return requests


def run_paged(assembly: Assembly, jobs: Sequence[Job]) -> Run:
    """Run jobs with the engine on its own thread, as in the server."""
    started = time.monotonic()
    requests = _requests_of(jobs, assembly)
    stamps: dict[tuple[int, int], list[float]] = {}
    outputs: list[list[int]] = [[] for _ in jobs]
    peak = (0, 0)
    lengths = [len(job.prompt) for job in jobs]  # number of tokens of each running request
    arrivals = [job.arrival for job in jobs] if jobs[-1].arrival else None
    for output in serve(assembly, requests, arrivals):
        for delta in output.deltas:
            when = output.finished_at - started - jobs[delta.key].arrival
            stamps.setdefault((delta.key, delta.sample), []).extend([when] * len(delta.token_ids))
            if delta.sample == 0:
                outputs[delta.key] += delta.token_ids
            lengths[delta.key] = 0 if delta.last else lengths[delta.key] + len(delta.token_ids)
        if output.stats.waiting == 0 and output.stats.running == len(jobs):
            # The newest token of a sequence is not in the KV cache yet.
            live = sum(lengths) - len(jobs)
            peak = max(peak, (output.stats.blocks_used * assembly.scheduler.blocks.block_size, live))
    seconds = time.monotonic() - started
    assert all(len(stamps[key, 0]) == job.output for key, job in enumerate(jobs))
    assert sum(map(len, stamps.values())) == sum(job.tokens for job in jobs)
    return Run(seconds, len(jobs), list(stamps.values()), outputs, *peak)
