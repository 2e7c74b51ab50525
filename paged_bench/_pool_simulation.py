"""Simulates a block pool: runs the scheduler and block manager without a model, and samples the pool's usage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Sequence
from paged_backend.scheduling.step_result import StepResult
from paged_bench._workload import DATASETS, lengths

RESERVATION = 2048  # slots that a contiguous cache reserves for each request
POOL_SLOTS = 16_384


@dataclass(frozen=True)
class Sample:
    """The pool usage at one time, and the slots that other allocators would use for the same requests."""

    requests: int
    live: int  # tokens in the pool
    allocated: int  # slots in used blocks
    unshared: int  # slots that the sequences would use without sharing blocks
    analytic: int  # slots that they need with sharing, computed from their lengths
    # Slots of contiguous allocation, which reserves for each request:
    maximum: int  # the maximum length of any request,
    power_of_two: int  # the power of two above its own length,
    oracle: int  # exactly its own length


def requests(
    dataset: str, count: int, sampling: Mapping[str, Any] | None = None, *, equal: bool = False
) -> list[GenerateRequest]:
    """Return requests with the lengths of a dataset or, with `equal`, all with its mean lengths."""
    rng = random.Random(0)
    count *= 1 if dataset == "ShareGPT" else 6  # Alpaca is shorter: about the same number of tokens
    prompts, outputs = ([mean] * count if equal else lengths(mean, count, rng) for mean in DATASETS[dataset])
    rng.shuffle(outputs)
    return [
        GenerateRequest(
            key, tuple(range(prompt)), SamplingParams(max_tokens=output, **(sampling or {})), 0, frozenset()
        )
        for key, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def simulate(work: Rows[GenerateRequest], block_size: int, every: int = 16) -> Iterator[Sample]:
    """Schedule all requests, and sample the pool every `every` steps while requests wait for blocks."""
    blocks = BlockManager(POOL_SLOTS // block_size, block_size)
    scheduler = Scheduler(blocks, max_num_seqs=4096, max_num_batched_tokens=16_384)
    for request in work:
        scheduler.add(request)
    step, rng = 0, random.Random(0)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, sampled(plan, rng))
        step += 1
        if step % every == 0 and scheduler.stats.waiting:
            yield sample_pool(scheduler)


def sampled(plan: Plan, rng: random.Random) -> StepResult:
    """Return token 0 for each sampled sequence, and candidates for each live beam."""
    sequences = [sequence for chunk in plan.chunks for sequence in chunk.sampled_sequences]
    widths = {index: sequence.request.sampling.beam_width for index, sequence in enumerate(sequences)}
    candidates = {index: random_candidates(width, rng) for index, width in widths.items() if width > 1}
    return StepResult([[0] for _ in sequences], candidates=candidates)


def random_candidates(width: int, rng: random.Random) -> list[Candidate]:
    """Return candidates whose probabilities fall about as fast as those of a fairly confident language model."""
    log_prob, row = -rng.expovariate(1), []
    for token in range(2 * width):
        row.append(Candidate(token, log_prob))
        log_prob -= rng.expovariate(1)
    return row


def distinct_slots(beams: Rows[Sequence], size: int) -> int:
    """Return the slots that beams need: beams with the same tokens up to the end of a block share it."""
    seen = set()
    for beam in beams:
        prefix = 0
        for start in range(0, beam.computed, size):
            prefix = hash((prefix, *beam.tokens[start : min(start + size, beam.computed)]))
            seen.add((start, prefix))
    return len(seen) * size


def sample_pool(scheduler: Scheduler) -> Sample:
    size = scheduler.blocks.block_size
    groups = scheduler.running
    totals = dict.fromkeys(("live", "unshared", "analytic", "maximum", "power_of_two", "oracle"), 0)
    for group in groups:
        prompt, samples = group.leader.num_prompt, len(group.sequences)
        shared = prompt // size * size if samples > 1 and group.forked else 0
        need = prompt + group.request.sampling.max_tokens
        totals["maximum"] += RESERVATION * samples
        totals["power_of_two"] += (1 << (need - 1).bit_length()) * samples
        totals["oracle"] += need * samples
        totals["live"] += shared
        totals["analytic"] += shared
        if group.beams:
            totals["analytic"] += distinct_slots(group.sequences, size) - shared
        for sequence in group.active:
            held = len(sequence.blocks) * size
            totals["unshared"] += held
            totals["live"] += sequence.computed - shared
            if not group.beams:
                totals["analytic"] += -(-sequence.computed // size) * size - shared
    return Sample(requests=len(groups), allocated=scheduler.blocks.num_used * size, **totals)


def utilisation(samples: Rows[Sample], of: str) -> float:
    """Return the share of slots that hold a token, over all samples. `of` is the field of Sample with the slots."""
    return sum(one.live for one in samples) / sum(getattr(one, of) for one in samples)
