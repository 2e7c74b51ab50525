"""The workloads of `paged bench cpu`, the figure that each one measures, and its targets."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from paged_bench._gguf import FASTEST_4_BIT
from paged_bench._workload import Job, Run, workload

PEERS = {  # contestants of each peer, by the peer's name for --peers
    "vllm": ("vLLM",),
    "llama.cpp": ("llama.cpp", f"llama.cpp, {FASTEST_4_BIT}"),
    "generate": ("transformers, one padded batch",),
    "batching": ("transformers, continuous",),
}
(VLLM_NAME,), (LLAMA_CPP_NAME, LLAMA_CPP_PACKED), (PADDED,), (CONTINUOUS,) = PEERS.values()
DECODE = "decode, batch 16, context 512"  # the scenario whose step is also profiled
LESS_IS_BETTER = ("ms", "s", "times idle")  # units


class NoSteadyStep(ValueError):
    """A run has no step of the kind that is to be timed."""


@dataclass(frozen=True)
class Scenario:
    """A workload and the figure that is computed from a run of it."""

    name: str
    jobs: list[Job]
    figure: Callable[[Run, Sequence[Job]], float]
    unit: str
    ratios: Mapping[str, float | None]  # target of our speedup over each contestant
    target: float | None = None


def step_ms(run: Run, jobs: Sequence[Job]) -> float:
    """Return the median duration of steps in which all sequences decode, in ms.

    It is the time between tokens of the sequence that started last, until the first sequence has finished.
    """
    begin, end = max(one[0] for one in run.stamps), min(one[-1] for one in run.stamps)
    last = max(run.stamps, key=lambda one: one[0])
    gaps = [later - earlier for earlier, later in pairwise(last) if begin <= earlier and later <= end]
    if not gaps:
        raise NoSteadyStep(f"no step in which all {len(run.stamps)} sequences decode")
    return 1e3 * statistics.median(gaps)


def output_rate(run: Run, jobs: Sequence[Job]) -> float:
    """Return output tokens per second."""
    return sum(job.tokens for job in jobs) / run.seconds


def prompt_rate(run: Run, jobs: Sequence[Job]) -> float:
    """Return prompt tokens per second."""
    return sum(len(job.prompt) for job in jobs) / max(one[0] for one in run.stamps)


def scenarios(vocab_size: int, limit: int, arrivals: float, quick: bool) -> list[Scenario]:
    """Return the scenarios, with lengths that fit into a model of `limit` positions.

    Args:
        arrivals: requests per second in scenarios with arrival times.
        quick: return only a small scenario for each peer.
    """
    rng = random.Random(2)

    def equal_jobs(batch: int, prompt: int, output: int) -> list[Job]:
        length = min(prompt, limit - output)
        return [Job([rng.randrange(vocab_size) for _ in range(length)], output) for _ in range(batch)]

    # With these lengths the first of 16 requests still decodes when the last one starts.
    requests, tokens = (4, 32) if quick else (32, 64)
    even = workload("even", requests, vocab_size, limit)
    prefix = [rng.randrange(vocab_size) for _ in range(min(512, limit // 2))]
    shared_prefix = [replace(job, prompt=(prefix + job.prompt)[: limit - job.output]) for job in even]
    throughput: dict[str, float | None] = {VLLM_NAME: 1.3}
    decode: dict[str, float | None] = {VLLM_NAME: 1.5, PADDED: 2.5, CONTINUOUS: 10.0}
    streams: dict[str, float | None] = {LLAMA_CPP_NAME: 1.0, LLAMA_CPP_PACKED: 1.0}
    timed = workload("even", requests, vocab_size, limit, arrivals)
    selected = [
        Scenario(DECODE, equal_jobs(16, 512, tokens), step_ms, "ms", decode, 20.0),
        Scenario("even lengths", even, output_rate, "tokens/s", throughput),
        Scenario(f"even lengths, {arrivals:g} requests/s", timed, output_rate, "tokens/s", throughput),
        Scenario("8 streams", equal_jobs(8, 144, tokens), output_rate, "tokens/s", streams),
    ]
    if quick:
        return selected
    samples = [replace(one, n=4) for one in even]
    prefill: dict[str, float | None] = {VLLM_NAME: 1.05, PADDED: None}
    single: dict[str, float | None] = {VLLM_NAME: 1.3, PADDED: None}
    return [
        *selected,
        Scenario("even lengths, 4 samples", samples, output_rate, "tokens/s", throughput),
        Scenario("even lengths behind 512 tokens in common", shared_prefix, output_rate, "tokens/s", throughput),
        Scenario("prefill, 16 prompts of 512", equal_jobs(16, 512, 1), prompt_rate, "tokens/s", prefill),
        Scenario("decode, batch 1, context 512", equal_jobs(1, 512, tokens), step_ms, "ms", single),
        Scenario("32 streams", equal_jobs(32, 144, tokens), output_rate, "tokens/s", streams),
    ]


def permute_tokens(seed: int, jobs: Sequence[Job], vocab_size: int) -> list[Job]:
    """Replace every token by another one, the same in all requests, so that shared prefixes stay shared."""
    other = list(range(vocab_size))
    random.Random(seed).shuffle(other)
    return [replace(job, prompt=[other[token] for token in job.prompt]) for job in jobs]
