"""Measure what paging does for memory: wasted slots, capacity, sharing, extents, hits, windows, latents and
states, requests at once, bookkeeping.

All parts but the last run the scheduler and block manager without a model, because block allocation depends only on
lengths. Lengths are log-normal, with the means that the paper reports for ShareGPT (161 in, 338 out) and Alpaca (19
in, 58 out), and at most 1,024 (Kwon et al. 2023, section 6.1; arXiv:2309.06180).
"""

from __future__ import annotations

import itertools
import random
import re
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.sizes import GIB
from paged_backend.engine.pools import PoolSizing
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import (
    CacheLayout,
    CacheSpec,
    LayerShape,
    StateShape,
    TensorShape,
    bytes_per_token,
    state_nbytes,
)
from paged_backend.kv.sequence import Sequence
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.plan import Plan, StepResult
from paged_backend.scheduling.scheduler import Scheduler
from paged_bench._engine import DATASETS, greedy, lengths, load, serve
from paged_bench._harness import (
    Bars,
    Benchmark,
    Lines,
    Option,
    Record,
    bounded,
    count,
    figures,
    model_option,
)
from paged_client.serving.repository import resolve_model

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BLOCK_SIZE = 16  # block size of the other parts
MIN_REQUESTS = 100
CONVERSATIONS, TURNS = 32, 12
MIN_EXTENT_REQUESTS = 600  # so that the pool is fragmented
WIDTHS = (2, 4, 6)  # samples or beams of one prompt
WASTE_TARGETS = {("ShareGPT", 16): 2.5, ("Alpaca", 4): 3.5}
WASTE_LIMITS = {("ShareGPT", 16): 2.2, ("Alpaca", 4): 3.0}
SHARING_REQUESTS = 300  # beams take long
RESERVATION = 2048  # slots that a contiguous cache reserves for each request
POOL_SLOTS = 16_384
EXTENT_POOL, EXTENT_SEQUENCES = 4096, 134  # blocks, and sequences that run at once, in about 90% of them


# --- a block pool without a model -------------------------------------------------------------------------------------


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
    dataset: str, count: int, sampling: Mapping[str, Any] | None = None, *, equal: bool = False, factor: int = 1,
    salted: bool = False,
) -> list[GenerateRequest]:  # fmt: skip
    """Return requests with the lengths of a dataset or, with `equal`, all with its mean lengths, times `factor`.
    salted: whether none finds blocks of another one in the prefix cache."""
    rng = random.Random(0)
    count *= 1 if dataset == "ShareGPT" else 6  # Alpaca is shorter: about the same number of tokens
    prompts, outputs = ([mean] * count if equal else lengths(mean, count, rng) for mean in DATASETS[dataset])
    rng.shuffle(outputs)
    return [
        GenerateRequest(
            key,
            tuple(range(factor * prompt)),
            SamplingParams(max_tokens=factor * output, cache_salt=str(key) if salted else "", **(sampling or {})),
            0,
            frozenset(),
        )
        for key, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def simulate(work: Rows[GenerateRequest], block_size: int) -> Iterator[Sample]:
    """Schedule all requests, and sample a pool of POOL_SLOTS while requests wait for blocks."""
    blocks = BlockManager(POOL_SLOTS // block_size, BlockLayout(block_size))
    return map(sample_pool, saturated(work, Scheduler(blocks, max_num_seqs=4096, max_num_batched_tokens=16_384)))


def saturated(work: Rows[GenerateRequest], scheduler: Scheduler, every: int = 16) -> Iterator[Scheduler]:
    """Schedule all requests, and yield the scheduler every `every` steps while requests wait."""
    for request in work:
        scheduler.add(request)
    step, rng = 0, random.Random(0)
    while scheduler.has_work:
        run_step(scheduler, rng)
        step += 1
        if step % every == 0 and scheduler.stats.waiting:
            yield scheduler


def run_step(scheduler: Scheduler, rng: random.Random | None = None) -> None:
    """Schedule and commit a step. rng: for the candidates of beams."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, sampled(plan, rng or random.Random(0)))


def sampled(plan: Plan, rng: random.Random) -> StepResult:
    """Return token 0 for each sampled sequence, and candidates for each live beam."""
    sequences = [sequence for chunk in plan.chunks for sequence in chunk.sampled_sequences]
    widths = {index: sequence.request.sampling.beam_width for index, sequence in enumerate(sequences)}
    candidates = {index: random_candidates(width, rng) for index, width in widths.items() if width > 1}
    return StepResult([[0] for _ in sequences], candidates=candidates)


def random_candidates(width: int, rng: random.Random) -> list[Candidate]:
    """Return candidates whose probabilities fall about as fast as a fairly confident language model's."""
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
            held = sequence.num_blocks * size
            totals["unshared"] += held
            totals["live"] += sequence.computed - shared
            if not group.beams:
                totals["analytic"] += -(-sequence.computed // size) * size - shared
    return Sample(requests=len(groups), allocated=scheduler.blocks.num_used * size, **totals)


def utilisation(samples: Rows[Sample], slots: str) -> float:
    """Return the share of slots that hold a token, over all samples. slots: name of the field with the slots."""
    return sum(sample.live for sample in samples) / sum(getattr(sample, slots) for sample in samples)


def waste(requested: int) -> Iterator[Record]:
    """Measure the share of slots that hold no token, by block size, beside contiguous allocation."""
    for dataset in DATASETS:
        work = requests(dataset, requested)
        for size in BLOCK_SIZES:
            samples, place = list(simulate(work, size)), (dataset, size)
            unused = {
                slots: 100 * (1 - utilisation(samples, slots))
                for slots in ("allocated", "maximum", "power_of_two", "oracle")
            }
            name, value = f"waste {dataset} block_size={size}", unused.pop("allocated")
            peers = {f"contiguous, {slots}": share for slots, share in unused.items()}
            yield Record(name, value, "%", WASTE_TARGETS.get(place), WASTE_LIMITS.get(place), peers)


def capacity(requested: int) -> Iterator[Record]:
    """Measure how many requests run at once, relative to a contiguous cache with RESERVATION slots for each.

    The limit is the figure without any wasted slot. It is below what the mean lengths suggest, because long requests
    stay longer.
    """
    for name, equal in (("lengths that vary", False), ("all of mean length", True)):
        samples = list(simulate(requests("ShareGPT", requested, equal=equal), BLOCK_SIZE))
        resident = statistics.mean(sample.requests for sample in samples) / (POOL_SLOTS // RESERVATION)
        limit = RESERVATION / (sum(sample.live for sample in samples) / sum(sample.requests for sample in samples))
        yield Record(f"capacity ShareGPT, {name}", resident, "x", 6.0, limit)


def sharing(requested: int, widths: Rows[int]) -> Iterator[Record]:
    """Measure the share of blocks that parallel sampling and beam search save by sharing, beside the computed share."""
    for dataset, kind, width in itertools.product(DATASETS, ("n", "beam_width"), widths):
        samples = list(simulate(requests(dataset, requested, {kind: width}), BLOCK_SIZE))
        unshared = sum(sample.unshared for sample in samples)
        saved = 100 * (1 - sum(sample.allocated for sample in samples) / unshared)
        analytic = 100 * (1 - sum(sample.analytic for sample in samples) / unshared)
        name = f"saved by sharing {dataset} {kind}={width}"
        yield Record(name, saved, "%", peers={"by arithmetic": analytic})


def extents(requested: int) -> Iterator[Record]:
    """Measure how many blocks follow each other in memory, on average over the block tables of running sequences.

    With prefix caching, blocks of ended sequences fill the rest of the pool. Requests are measured while others wait,
    but not the first third of them.
    """
    for factor, caching in itertools.product((1, 4), (False, True)):
        pool = factor * EXTENT_POOL
        blocks = BlockManager(pool, BlockLayout(BLOCK_SIZE), caching=caching)
        scheduler = Scheduler(blocks, max_num_seqs=EXTENT_SEQUENCES, max_num_batched_tokens=2048)
        for request in requests("ShareGPT", requested, factor=factor, salted=True):
            scheduler.add(request)
        held = runs = used = samples = step = 0
        while scheduler.has_work and (waiting := scheduler.stats.waiting or not step):
            run_step(scheduler)
            step += 1
            if step % 8 == 0 and 3 * waiting < 2 * requested:
                tables = [table for group in scheduler.running for table in group.leader.tables if table]
                held += sum(map(len, tables))
                runs += sum(1 + sum(b != a + 1 for a, b in itertools.pairwise(table)) for table in tables)
                used, samples = used + blocks.num_used, samples + 1
        lengths_of = "ShareGPT" if factor == 1 else f"{factor} x ShareGPT"
        name = f"extents {lengths_of}, {'with' if caching else 'without'} prefix caching"
        peers = {"% of the pool in use": 100 * used / max(1, samples) / pool}
        yield Record(name, held / max(1, runs), "blocks", 6.0, peers=peers)


def conversations() -> Iterator[Record]:
    """Measure the share of prompt tokens that conversations with short turns find in the cache.

    The limit is what a cache of single tokens finds: all tokens of the turn before but the last one, which was sampled
    but not computed.
    """
    for size in (16, 64):
        blocks = BlockManager(1 << 16, BlockLayout(size), caching=True)
        scheduler, rng = Scheduler(blocks, max_num_seqs=CONVERSATIONS, max_num_batched_tokens=8192), random.Random(0)
        history: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
        asked = known = whole = 0
        for turn, index in itertools.product(range(TURNS), range(CONVERSATIONS)):
            before = len(history[index])
            prompt = history[index] + [rng.randrange(1, 50_000) for _ in range(rng.randint(5, 20))]
            sampling = SamplingParams(max_tokens=rng.randint(5, 20))
            history[index] = prompt + [0] * sampling.max_tokens
            asked += len(prompt)
            known += max(0, before - 1)
            whole += max(0, before - 1) // size * size
            scheduler.add(GenerateRequest(turn * CONVERSATIONS + index, tuple(prompt), sampling, 0, frozenset()))
            while index + 1 == CONVERSATIONS and scheduler.has_work:
                run_step(scheduler)
        found, stats = 100 / asked, scheduler.stats
        peers = {"full blocks only": found * whole, "% of blocks copied": 100 * stats.copies / (TURNS * CONVERSATIONS)}
        yield Record(
            f"hits, conversations, block_size={size}", found * stats.cached_tokens, "%", None, found * known, peers
        )


def bookkeeping(steps: int) -> Iterator[Record]:
    """Measure the time of schedule and commit for each decoding sequence, in microseconds."""
    for running, context in itertools.product((256, 1024), (64, 1024)):
        step = decoding(BLOCK_SIZE, running, context, steps)
        name = f"bookkeeping running={running} context={context}"
        times = [step() for _ in range(steps)]
        yield Record(name, statistics.median(times), "us/sequence/step", target=3.0)


def decoding(block_size: int, running: int, context: int, steps: int) -> Callable[[], float]:
    """Return a function that schedules and commits a step of `running` sequences that decode, and returns its time in
    microseconds for each sequence. Their prompts, of `context` tokens, are computed.

    steps: how often it is called at most.
    """
    blocks = BlockManager(running * ((context + steps) // block_size + 2), BlockLayout(block_size), caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=running, max_num_batched_tokens=running * context)
    for key in range(running):
        prompt = tuple((key * 7919 + position) % 50_000 for position in range(context))
        scheduler.add(GenerateRequest(key, prompt, SamplingParams(max_tokens=steps + 2), 0, frozenset({2})))

    def step() -> float:
        started = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult.of_tokens([0] * running))
        return (time.perf_counter() - started) / running * 1e6

    step()
    return step


# --- windows, latents and states --------------------------------------------------------------------------------------


LENGTHS = (8192, 32_768)
CHUNK = 2048  # prompt tokens of a step
# Tokens generated after the prompt. The memory is measured after each, as blocks fill and leave the window.
DECODED = 48
POOL = 64 * GIB
TARGET = 1.05
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ModelShape:
    """What the layers of a model keep for a sequence."""

    name: str
    layers: tuple[LayerShape, ...]  # layers with attention
    states: tuple[StateShape, ...] = ()  # states of the recurrent layers
    # What a pool without this feature would keep: all tokens, keys and values of all heads, in every layer.
    plain: tuple[LayerShape, ...] = ()

    def layout(self, length: int) -> CacheLayout:
        """Return the layout for contexts of at most `length` tokens."""
        sizes = {"max_model_len": length, "max_pending": 2 * CHUNK}
        return CacheLayout.of(self.layers, BLOCK_SIZE, DTYPE, states=self.states, **sizes)

    def required(self, length: int) -> int:
        """Return the bytes that the model needs to continue a sequence of `length` tokens."""
        return CacheSpec(self.layers, self.states, DTYPE, length).token_bytes(length) + state_nbytes(self.states)

    def held(self, length: int) -> int:
        """Return the most bytes that a sequence holds while it decodes up to `length` tokens."""
        layout = self.layout(length)
        return held_pages(layout, length) * layout.page_bytes

    def requests(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit into POOL."""
        layout = self.layout(length)
        return POOL // layout.page_bytes // layout.blocks.pages_for([length], [1], 0)


def _token_bytes(layers: Rows[LayerShape]) -> int:
    return bytes_per_token(layers, DTYPE)


def _windowed(name: str, full: int, windowed: int, window: int, heads: int, head_dim: int) -> ModelShape:
    """Return a model with `full` layers of full attention and `windowed` layers with a sliding window."""
    layers = [LayerShape(heads, head_dim)] * full + [LayerShape(heads, head_dim, window=window)] * windowed
    return ModelShape(name, tuple(layers), plain=(LayerShape(heads, head_dim),) * (full + windowed))


def _latent(name: str, layers: int, heads: int) -> ModelShape:
    """Return a model with the latent attention of DeepSeek V2 and V3: 512 elements for keys and values, 64 for
    positions. Each of its heads has keys of 192 and values of 128 elements."""
    expanded = (LayerShape(heads, 192, 128),) * layers
    return ModelShape(name, (LayerShape(1, 576, 512, latent=True),) * layers, plain=expanded)


def _hybrid(name: str, full: LayerShape, num_full: int, state: StateShape, num_states: int) -> ModelShape:
    """Return a model with layers of full attention and recurrent layers. transformers keeps the states of scans in
    float32."""
    return ModelShape(name, (full,) * num_full, (state,) * num_states, plain=(full,) * (num_full + num_states))


MODELS = (
    _windowed("Gemma 3 270M", 3, 15, 512, 1, 256),
    _windowed("Gemma 3 27B", 10, 52, 1024, 16, 128),
    _windowed("gpt-oss 20B", 12, 12, 128, 8, 64),
    _windowed("Mistral 7B v0.1", 0, 32, 4096, 8, 128),
    _latent("DeepSeek V2 Lite", 27, 16),
    _latent("DeepSeek V3", 61, 128),
    _hybrid(
        "Qwen3-Next 80B",
        LayerShape(2, 256),
        12,
        StateShape(TensorShape((8192, 4), DTYPE), TensorShape((32, 128, 128), torch.float32)),
        36,
    ),
    _hybrid(
        "Granite 4.0 H-Small",
        LayerShape(8, 128),
        4,
        StateShape(TensorShape((8448, 4), DTYPE), TensorShape((128, 64, 128), torch.float32)),
        36,
    ),
    _hybrid("LFM2 1.2B", LayerShape(8, 64), 6, StateShape(TensorShape((2048, 3), DTYPE), None), 10),
)


def cache_memory() -> Iterator[Record]:
    """Measure memory held against memory required, and how many requests fit into a pool.

    The peers are the figures of a pool that keeps keys and values of all tokens, heads and layers, and of a sequence
    with a second state, of its prompt, in the prefix cache.
    """
    for shape, length in itertools.product(MODELS, LENGTHS):
        name = f"{shape.name}, {length:,} tokens"
        required, plain = shape.required(length), length * _token_bytes(shape.plain)
        ratio = shape.held(length) / required
        peers = {"all kept": plain / required}
        if shape.states:
            peers["with a checkpoint"] = ratio + shape.layout(length).state_bytes / required
        yield Record(f"memory, {name}", ratio, "x required", TARGET, 1.0, peers)
        few = {"all kept": POOL // plain}
        yield Record(f"requests in 64 GiB, {name}", shape.requests(length), "requests", peers=few)


def held_pages(layout: CacheLayout, length: int) -> int:
    """Return the largest number of pages that a sequence holds while it decodes up to `length` tokens."""
    pages = layout.blocks.pages_for([length], [length], 0)
    blocks = BlockManager(pages, layout.blocks)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=CHUNK)
    prompt = (0,) * (length - DECODED)
    scheduler.add(GenerateRequest(0, prompt, SamplingParams(max_tokens=DECODED), 0, frozenset()))
    most = 0
    while scheduler.has_work:
        run_step(scheduler)
        if any(group.leader.generated > 1 for group in scheduler.running):
            most = max(most, blocks.num_used)
    return most


# --- concurrent requests ----------------------------------------------------------------------------------------------


CONTIGUOUS = 16  # requests that fit if each has contiguous memory for its longest context
_named = {model.name: model for model in MODELS}
KINDS = {
    "dense": ModelShape("Llama 3.1 8B", (LayerShape(8, 128),) * 32),
    "windowed": _named["gpt-oss 20B"],
    "hybrid": _named["Qwen3-Next 80B"],
    "latents": _named["DeepSeek V2 Lite"],
    # The layers of both have windows, and different shapes.
    "draft model": ModelShape("Gemma 3 27B with 270M", _named["Gemma 3 27B"].layers + _named["Gemma 3 270M"].layers),
}


def concurrency(requested: int, factors: Rows[int]) -> Iterator[Record]:
    """Measure how many requests run at once in the bytes in which CONTIGUOUS requests fit in contiguous memory.

    The peer is a pool with one kind of page, which keeps all tokens in every layer, and reserves two slots of states
    for each sequence that may run: its own, and one for a checkpoint.
    """
    for (kind, model), factor in itertools.product(KINDS.items(), factors):
        longest, states = factor * RESERVATION, state_nbytes(model.states)
        budget = CONTIGUOUS * (longest * _token_bytes(model.layers) + states)
        fixed = CacheLayout.of([replace(layer, window=None) for layer in model.layers], BLOCK_SIZE, DTYPE)

        def before(max_num_seqs: int, layout: CacheLayout = fixed, states: int = states) -> tuple[CacheLayout, int]:
            return layout, 2 * max_num_seqs * states

        def most(pools: Callable[[int], tuple[CacheLayout, int]], budget: int = budget, factor: int = factor) -> float:
            return most_requests(requested, factor, budget, pools)

        peers = {"contiguous": CONTIGUOUS, "one kind of page": most(before)}
        name = f"requests at once, {kind}: {model.name}, {'' if factor == 1 else f'{factor} x '}ShareGPT"
        yield Record(name, most(partial(_pools, model, longest)), "requests", peers=peers)


def _pools(model: ModelShape, longest: int, max_num_seqs: int) -> tuple[CacheLayout, int]:
    """Return the layout of the engine's pools, which reserve nothing for states."""
    options = {"model": model.name, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max(CHUNK, max_num_seqs)}
    cache = CacheSpec(model.layers, model.states, DTYPE, longest)
    return PoolSizing(EngineConfig.from_options(options), cache, torch.device("cpu")).layout, 0


def most_requests(requested: int, factor: int, budget: int, pools: Callable[[int], tuple[CacheLayout, int]]) -> float:
    """Return the most requests that run at once in `budget` bytes, on average.

    pools: returns the layout and the bytes that are reserved for the states of a maximum number of sequences. This
    number is chosen: a higher one leaves fewer pages.
    """

    def running(max_num_seqs: int) -> float:
        layout, states = pools(max_num_seqs)
        return mean_running(requested, factor, (budget - states) // layout.page_bytes, layout.blocks, max_num_seqs)

    if not pools(requested)[1]:
        return running(requested)
    fits, too_many = 0, requested
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if running(middle) > 0.98 * middle else (fits, middle)
    return max(running(fits), running(too_many))


@cache
def mean_running(requested: int, factor: int, num_pages: int, layout: BlockLayout, max_num_seqs: int) -> float:
    """Return how many requests with `factor` times the lengths of ShareGPT run at once, on average while others wait,
    but not the first third of the requests; all of them if none waits, and 0 if the longest may not fit."""
    work = requests("ShareGPT", requested, factor=factor)
    longest = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in work)
    if layout.pages_for([longest], [longest], 0) > num_pages:
        return 0.0
    scheduler = Scheduler(
        BlockManager(num_pages, layout),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(CHUNK, max_num_seqs),
    )
    running = [
        len(scheduler.running) for _ in saturated(work, scheduler) if 3 * scheduler.stats.waiting < 2 * requested
    ]
    return statistics.mean(running) if running else float(requested)


# --- the prefix cache -------------------------------------------------------------------------------------------------


def system_prompt(model: str, count: int) -> Iterator[Record]:
    """Measure the time to first token of requests with a shared system prompt, with the prefix cache on and off.

    The system prompt has 512 tokens, or half of the model's maximum length. Requests run one after the other.
    """
    options = {"model": resolve_model(model), "dtype": "float32", "num_gpu_blocks_override": 512}
    medians, hit_rate, shared = dict[bool, float](), 0.0, 0
    for caching in (True, False):
        assembly, rng = load(options | {"enable_prefix_caching": caching}), random.Random(0)
        draw = partial(rng.randrange, assembly.limits.vocab_size)
        shared = min(512, assembly.limits.max_model_len // 2)
        system, times = [draw() for _ in range(shared)], []
        for _ in range(count):
            started = time.perf_counter()
            for _ in serve(assembly, greedy(assembly, [system + [draw() for _ in range(24)]], 1)):
                pass
            times.append(time.perf_counter() - started)
        medians[caching] = 1e3 * statistics.median(times)
        if caching:
            hit_rate = 100 * assembly.scheduler.stats.cached_tokens / (count * (shared + 24))
    yield Record(f"hit rate, system prompt of {shared} tokens", hit_rate, "%", limit=100 * shared / (shared + 24))
    yield Record("time to first token, cached", medians[True], "ms", peers={"cache off": medians[False]})


# --- the benchmark -------------------------------------------------------------------------------------------------


def measure(args: Namespace) -> Iterator[Record]:
    yield from waste(args.requests)
    yield from capacity(args.requests)
    yield from sharing(min(args.requests, SHARING_REQUESTS), WIDTHS[:2] if args.quick else WIDTHS)
    yield from cache_memory()
    yield from concurrency(300 if args.quick else 600, (1,) if args.quick else (1, 4))
    yield from extents(max(args.requests, MIN_EXTENT_REQUESTS))
    yield from conversations()
    yield from bookkeeping(min(args.requests, 200))
    yield from system_prompt(args.model, 2 if args.quick else args.requests // 10)


def panels(records: Rows[Record]) -> Iterator[Bars | Lines]:
    wasted = {name: figures(records, f"waste {name} block_size=(.*)") for name in DATASETS}
    yield Lines("slots that hold no token, %", _numbers(wasted), "tokens per block")
    by_name = {record.name: record for record in records}
    paged = by_name["waste ShareGPT block_size=16"]
    shown = {"blocks of 16": paged.value or 0.0} | {
        name.replace("contiguous, ", "").replace("_", " "): value for name, value in paged.peers.items()
    }
    yield Bars("waste on ShareGPT lengths, %", shown, grey=[name for name in shown if name != "blocks of 16"])
    kinds = {"samples": "n", "beams": "beam_width"}
    saved = {
        f"{name}, {kind}": figures(records, f"saved by sharing {name} {field}=(.*)")
        for name in DATASETS
        for kind, field in kinds.items()
    }
    yield Lines("blocks saved by sharing, %", _numbers(saved), "samples or beams of one prompt")
    held = {name: by_name[f"memory, {name}, 8,192 tokens"] for name in (shape.name for shape in MODELS)}
    shares = {name: 100 * (record.value or 0.0) / record.peers["all kept"] for name, record in held.items()}
    yield Bars("memory at 8,192 tokens, % of all keys and values", shares)
    bars: dict[str, float] = {}
    for record in records:
        if match := re.fullmatch(r"requests at once, (.*): .*, ((?:\d x )?ShareGPT)", record.name):
            kind = f"{match[1]}, {match[2]}"
            bars |= {kind: record.value or 0.0, f"{kind}, one kind of page": record.peers["one kind of page"]}
    grey = [name for name in bars if name.endswith("one kind of page")]
    yield Bars(f"requests at once, in the bytes of {CONTIGUOUS} contiguous ones", bars, grey)


def _numbers(lines: Mapping[str, Mapping[str, float]]) -> dict[str, dict[float, float]]:
    return {name: {float(x): y for x, y in line.items()} for name, line in lines.items()}


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        Option(
            "--requests",
            "requests to simulate (default: 2000); a tenth of them for the model",
            2000,
            type=bounded(count, MIN_REQUESTS, why="so that some wait for blocks"),
        ),
        model_option(help="model of the last part"),
    ),
    quick={"requests": MIN_REQUESTS},
)
