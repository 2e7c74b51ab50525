"""What is run once before a model is ready: a step as large as steps get, and a block copied, each timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from paged_kernels import launch
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_backend.api.request import GenerateRequest, bitmask
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import PackedBatch, pack
from paged_backend.execution.drafter import Drafter
from paged_backend.execution.graphs import GraphShape, draft_shapes, graph_capture, graph_shapes, largest_shapes
from paged_backend.execution.runner import Runner
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.memory.kv_cache import KVCache
from paged_backend.models.adapter_rows import adapter_rows
from paged_backend.models.lora import Lora
from paged_backend.scheduling.block_manager import BlockManager, Copy, Move
from paged_backend.scheduling.plan import MOST_SCORED, Chunk, Costs, Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Group

REPEATS = 3
CONTEXTS = (256, 1024, 8192, 65536)  # up to which lengths attention's tiles differ, or are split
LENGTHS = (2, 4, 8, 16, 32, 64, 256, 512, 4096)  # of chunks, likewise; the other kernels' pieces by their rows
ROW_BUCKETS = 4  # in decode
SAMPLINGS: tuple[dict[str, Any], ...] = tuple(  # penalties and constraints make logits float32
    kind | more
    for more in ({}, {"presence_penalty": 0.1}, {"allowed_token_ids": frozenset((0,)), "logit_bias": ((0, 1.0),)})
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"logprobs": InputLimits.max_logprobs})
)
MANY = 512  # rows at the most of which room is made for logits in float32
MOVED = 8  # blocks at a time: what each costs among others


@dataclass(frozen=True)
class WarmUpResult:
    """What was found when the model ran for the first time."""

    seconds_per_token: float  # in a step as large as steps get
    gpu_bytes: int  # of device memory that activations and recorded steps will take, beside weights and pool


def warm_up(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> WarmUpResult:
    """Run a step as large as steps get over a pool just large enough, twice, on a GPU one of every other kind as well,
    and record the largest steps. Afterwards the peak of activation memory is known, which the real pool must leave room
    for, and no request pays for initialisation."""
    spec = loaded.spec
    length = min(config.max_num_batched_tokens, spec.max_model_len - 1)
    count = min(config.max_num_seqs, -(-config.max_num_batched_tokens // length))
    blocks = BlockManager(count * -(-length // config.block_size), config.block_size)
    scheduler = Scheduler(blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=count * length)
    for key in range(count):
        scheduler.add(GenerateRequest(key, (0,) * length, SamplingParams(max_tokens=1), 0, frozenset()))
    kv = KVCache.allocate(
        loaded.layers, num_blocks=blocks.num_blocks, block_size=blocks.block_size, dtype=spec.kv_dtype, device=device
    )
    plan, runner = scheduler.schedule(), build_runner(config, loaded, kv)
    assert plan is not None

    def step() -> None:
        runner.launch(pack(plan, block_size=blocks.block_size)).result()

    def everything() -> None:
        step()
        if runner.lora:
            runner.launch(_with_adapters(pack(plan, block_size=blocks.block_size), runner.lora)).result()
        if device.type == "cuda":
            _rehearse(config, spec.max_model_len, spec.vocab_size, runner)

    activations = _activation_bytes(everything, device)
    return WarmUpResult(_seconds(step, device) / plan.num_tokens, activations + graph_bytes(config, loaded, runner))


def _with_adapters(packed: PackedBatch, lora: Lora) -> PackedBatch:
    """A batch that goes through as many as there may be."""
    lora.fill_dummy()
    return replace(packed, adapters=adapter_rows(np.arange(packed.input_ids.numel()) % lora.slots))


def build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVCache,
    host: KVCache | None = None,
    agree: Callable[[Tensor], None] = lambda tokens: None,
) -> Runner:
    """The model, and the one that guesses if there is one, over these pools."""
    drafter, count = None, len(loaded.spec.layers)
    if loaded.draft:
        drafter = Drafter(loaded.draft.model, kv.layer_range(count, len(kv.layers)))
    max_draws = config.max_num_seqs + config.max_num_batched_tokens  # with every guess
    return Runner(
        loaded.model, kv, host, max_draws=max_draws, drafter=drafter, lora=loaded.lora, broadcast_tokens=agree
    )


def graph_shapes_of(config: EngineConfig, runner: Runner) -> list[GraphShape]:
    """The steps to record."""
    return graph_shapes(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        queries=1 + config.num_speculative_tokens,
        shared=runner.shares_prefixes,
    )


def record(config: EngineConfig, loaded: LoadedModel, runner: Runner, every: list[GraphShape]) -> None:
    """Record steps of these kinds, where the device can and the options let it."""
    how = None if config.enforce_eager else graph_capture(runner.kv.device)
    if how:
        longest = loaded.spec.max_model_len
        runner.capture_graphs(how, every, max_blocks=-(-longest // config.block_size), max_context_len=longest)


def _rehearse(config: EngineConfig, max_model_len: int, vocab_size: int, runner: Runner) -> None:
    for plan in warm_up_plans(config, max_model_len, vocab_size):
        for group in dict.fromkeys((None, runner.gqa_group)):
            runner.launch(pack(plan, block_size=config.block_size, gqa_group=group)).result()


def warm_up_plans(config: EngineConfig, max_model_len: int, vocab_size: int) -> Iterator[Plan]:
    """Steps of every kind that has kernels of its own, which are compiled at the first of them: for seconds each, in
    which every request would wait. All in block 0, for nobody reads what they give."""
    longest, budget = max_model_len - 1, config.max_num_batched_tokens
    contexts = [*(one for one in CONTEXTS if one < longest), longest]
    lengths = [*(one for one in LENGTHS if one < min(longest, budget)), min(longest, budget)]

    def chunk(start: int, length: int, **sampling: Any) -> Chunk:
        tokens = (0,) * (start + length)
        params = SamplingParams(**sampling)
        allowed = bitmask(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        request = GenerateRequest(0, tokens, params, 0, frozenset(), logprobs=params.logprobs, allowed=allowed)
        one = Group.of(request).leader
        one.blocks = [0] * -(-len(tokens) // config.block_size)
        return Chunk(one, start, length, draws=(one,))

    for context in contexts:
        rows = tuple(chunk(context - 1, 1) for _ in range(min(ROW_BUCKETS, config.max_num_seqs)))
        yield Plan(rows)
        for length in lengths:
            if length <= context:
                yield Plan((chunk(context - length, length),))
            if len(rows) > 1:  # decode rows first, as the scheduler has them
                yield Plan((*rows[1:], chunk(0, min(length, budget - len(rows) + 1))))
    scored = min(MOST_SCORED, longest - 1, budget - 1)
    whole = replace(chunk(0, scored + 1, prompt_logprobs=config.max_logprobs), scored=range(scored))
    yield Plan((whole,), has_prompt_outputs=True)
    for sampling in SAMPLINGS:
        if "logprobs" in sampling:
            sampling = sampling | {"logprobs": config.max_logprobs}
        for count in dict.fromkeys(min(rows, MANY, config.max_num_seqs) for rows in launch.ROW_BUCKETS):
            yield Plan(tuple(chunk(0, 1, **sampling) for _ in range(count)))


def _activation_bytes(steps: Callable[[], None], device: torch.device) -> int:
    """What steps take at their peak, beyond what was there. What this process did before does not count: loading may
    have taken more, and so may another model."""
    if device.type != "cuda":
        steps()
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    steps()
    return torch.cuda.max_memory_allocated(device) - before


def graph_bytes(config: EngineConfig, loaded: LoadedModel, runner: Runner) -> int:
    """What recorded steps will take of the GPU. All share the memory of the largest, and each takes a little of its
    own: found by recording the largest of each sort, and the largest two."""
    every, device = graph_shapes_of(config, runner), runner.kv.device
    if device.type != "cuda":
        return 0

    def count(some: list[GraphShape]) -> int:
        return len(some) + (len(draft_shapes(some)) if runner.drafter else 0)

    def taken(some: list[GraphShape]) -> int:
        before = _free(device)
        record(config, loaded, runner, some)
        after = _free(device)
        runner.release_graphs()
        return max(0, before - after)

    first, second = largest_shapes(every, 1), largest_shapes(every, 2)
    taken(first)  # what the first sets up for good counts as taken already, later on
    least = taken(first)
    if second == first:
        return least
    more = max(0, taken(second) - least)
    return least + more * (count(every) - count(first)) // (count(second) - count(first))


def _free(device: torch.device) -> int:
    torch.cuda.empty_cache()  # a recording begins with it, and would seem to give memory back
    return torch.cuda.mem_get_info(device)[0]


def measure_costs(runner: Runner, seconds_per_token: float, num_host_blocks: int) -> Costs:
    """What decides between copying and computing. The pool is empty still, so its first blocks may be copied."""
    move = copy = 0.0
    count = min(MOVED, num_host_blocks, len(runner.kv.tensors[0]))
    if count:
        moves = tuple(Move(block, block, None) for block in range(count))
        move = _median(lambda: runner.move(Plan((), moves_out=moves, moves_in=moves)), runner.kv.device) / 2 / count
    count = min(MOVED, len(runner.kv.tensors[0]) // 2)
    if count:
        copies = tuple(Copy(block, count + block) for block in range(count))
        copy = _median(lambda: runner.move(Plan((), copies=copies)), runner.kv.device) / count
    return Costs(token=seconds_per_token, copy=copy, move=move)


def _median(action: Callable[[], None], device: torch.device) -> float:
    action()  # the first one pays for memory that was never touched
    return statistics.median(_seconds(action, device) for _ in range(REPEATS))


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
