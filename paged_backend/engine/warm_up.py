"""Warm-up before the pools are sized: on a GPU the largest step and a step of every kind, on a CPU one step.

Afterwards the peak of activation memory is known, kernels are compiled, and no request pays for initialization. Only
the first step runs all layers.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_backend.api.request import GenerateRequest, bitmask
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import requested_outputs
from paged_backend.engine.pools import Pools, PoolSizing
from paged_backend.engine.runner_builder import build_runner, capture_graphs, graph_shapes_of
from paged_backend.execution.batch import PackedBatch, consecutive_page_tables, consecutive_pages, pack
from paged_backend.execution.graphs import GraphShape, draft_shapes, largest_shapes
from paged_backend.execution.runner import Runner
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.ledger import Transfer, Transfers
from paged_backend.loading.model_loader import LoadedModel, ModelSpec
from paged_backend.models.lora import Lora, adapter_rows
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import MAX_SCORED, Chunk, Costs, Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.utils.startup import Progress
from paged_kernels import launch_table
from paged_kernels.attention_plan import CHOICES, Choice, force
from paged_kernels.compilation import compile_ahead
from paged_kernels.paging import MIN_SAVED_TOKENS

REPEATS = 3
CONTEXTS = (256, 1024, 8192, 65536)  # context lengths of decode steps, which need memory for different splits
CONTEXT = 1024  # minimum context length of other decode rows
SHARING_ROWS = (3, 64)  # decode rows that share a prefix, beside a chunk: for both tiles of the pass over it
CHUNK_LENGTHS = tuple(2**power for power in range(1, 13))  # rows, the upper bounds of buckets of tuned tiles
DECODE_ROWS = 4
MAX_SHARING_ROWS = 256  # decode rows with a shared prefix, above which its tile no longer grows
SAMPLINGS: tuple[dict[str, Any], ...] = tuple(  # kinds of sampling; penalties and constraints use float32 logits
    kind | more
    for more in ({}, {"presence_penalty": 0.1}, {"allowed_token_ids": frozenset((0,)), "logit_bias": ((0, 1.0),)})
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.9}, {"logprobs": InputLimits.max_logprobs})
)
MOST_CPU_TOKENS = 128  # maximum tokens of the step on a CPU, where the memory of larger steps need not be known
MAX_SAMPLED_ROWS = 512  # maximum sampled rows of a warm-up step, whose float32 logits take reserved memory
MEASURED_BLOCKS = 8  # blocks in one measured transfer, so that they share its fixed cost as in serving


@dataclass(frozen=True)
class WarmUpResult:
    """Measurements of the first run of the model."""

    seconds_per_token: float  # time per token in a large step
    gpu_bytes: int  # GPU memory for activations and CUDA graphs, besides the weights and the pool


def warm_up(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> WarmUpResult:
    """Run the largest step twice over the smallest pool that it fits into, or on a CPU a step of at most
    MOST_CPU_TOKENS. On a GPU, also run a step of every kind and capture the largest graphs. Return the speed, and the
    memory that the pool must leave free."""
    spec = loaded.spec
    tokens = min(config.max_num_batched_tokens, MOST_CPU_TOKENS if device.type == "cpu" else sys.maxsize)
    length = min(tokens, spec.max_model_len - 1)
    count = min(config.max_num_seqs, -(-tokens // length))
    layout = PoolSizing(config, loaded.cache, device).layout
    pages = max(1, layout.blocks.pages_for([length] * count, [length] * count, 0))
    blocks = BlockManager(pages, layout.blocks)
    plan = _largest_plan(blocks, count, length)
    runner = build_runner(config, loaded, device, Pools(layout, pages))

    def step() -> None:
        runner.launch(largest()).result()

    def largest() -> PackedBatch:
        state_pages = blocks.states.page_rows if blocks.states else None
        return pack(plan, block_size=blocks.block_size, page_tables=blocks.page_tables, state_pages=state_pages)

    def all_steps(advance: Callable[[], object]) -> None:
        step()
        advance()
        if runner.lora:
            runner.launch(_with_adapters(largest(), runner.lora)).result()
            advance()
        if device.type == "cuda" and not spec.pooling:
            run_warm_up_steps(config, spec, runner, advance)

    compile_ahead(device, lambda: all_steps(lambda: None), lambda n: Progress("compiling", n, "kernels").advance)
    progress = Progress("warming up", 2 + bool(runner.lora) + _num_warm_up_steps(config, spec, runner))
    activations = _activation_bytes(lambda: all_steps(progress.advance), device)
    seconds = _seconds(step, device)
    progress.advance()
    graphs = 0 if spec.pooling else graph_bytes(config, loaded, runner)
    return WarmUpResult(seconds / plan.num_tokens, activations + graphs)


def _largest_plan(blocks: BlockManager, count: int, length: int) -> Plan:
    scheduler = Scheduler(
        blocks,
        max_num_seqs=count,
        max_num_batched_tokens=count * length,
        preemption="recompute",
    )
    for key in range(count):
        scheduler.add(GenerateRequest(key, (0,) * length, SamplingParams(max_tokens=1), 0, frozenset()))
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def _with_adapters(packed: PackedBatch, lora: Lora) -> PackedBatch:
    """Return the batch with its rows spread over all adapter slots."""
    lora.fill_dummy()
    return replace(packed, adapters=adapter_rows(np.arange(packed.input_ids.numel()) % lora.slots))


def _num_warm_up_steps(config: EngineConfig, spec: ModelSpec, runner: Runner) -> int:
    if runner.kv.device.type != "cuda" or spec.pooling:
        return 0
    return sum(1 for _ in _steps_of(config, spec)) * len(_gqa_groups(runner))


def _steps_of(config: EngineConfig, spec: ModelSpec) -> Iterator[WarmUpStep]:
    return warm_up_steps(config, spec.max_model_len, spec.vocab_size, has_states=bool(spec.states))


def _gqa_groups(runner: Runner) -> list[int | None]:
    return list(dict.fromkeys((None, runner.gqa_group)))


def run_warm_up_steps(config: EngineConfig, spec: ModelSpec, runner: Runner, advance: Callable[[], object]) -> None:
    """Run every step of `warm_up_steps` with one layer of each kind. `advance` is called after each."""
    with ExitStack() as stack:
        for model in (runner.model, *([runner.drafter.model] if runner.drafter else [])):
            stack.enter_context(distinct_layers(model))
        for step in _steps_of(config, spec):
            for gqa_group in _gqa_groups(runner):
                packed = _pack(step.plan, config, runner, gqa_group)
                with step.forced():
                    runner.launch(packed).result()
                advance()


def _pack(plan: Plan, config: EngineConfig, runner: Runner, gqa_group: int | None = None) -> PackedBatch:
    """Pack a step that uses no block but block 0, which has the first pages."""
    states = runner.kv.states
    return pack(
        plan,
        block_size=config.block_size,
        gqa_group=gqa_group,
        page_tables=consecutive_page_tables(runner.kv.pages_per_block),
        state_pages=consecutive_pages(states.pages_per_block) if states else None,
    )


class WarmUpStep(NamedTuple):
    """A step of the warm-up."""

    plan: Plan
    choice: Choice | None = None  # for the attention of the step; None: its sizes decide

    def forced(self) -> AbstractContextManager[None]:
        """Return the context in which attention follows the choice."""
        return force(self.choice) if self.choice else nullcontext()


def warm_up_steps(
    config: EngineConfig, max_model_len: int, vocab_size: int, *, has_states: bool = False
) -> Iterator[WarmUpStep]:
    """Yield a step of every kind that has compiled kernels of its own.

    A kernel that is compiled while requests are served delays all of them by seconds. What is compiled for attention
    depends on the longest chunk and on a choice by the sizes of the whole step. The choices are forced, so that few
    small steps are enough. All steps use block 0, since their results are not read. has_states: whether the model has
    recurrent layers.
    """
    longest, budget = max_model_len - 1, config.max_num_batched_tokens
    lengths = [*(length for length in CHUNK_LENGTHS if length < min(longest, budget)), min(longest, budget)]

    def chunk(start: int, length: int, **sampling: Any) -> Chunk:
        tokens = (0,) * (start + length)
        params = SamplingParams(**sampling)
        allowed = bitmask(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        request = GenerateRequest(
            0, tokens, params, 0, frozenset(), token_outputs=requested_outputs(["logprobs"], params), allowed=allowed
        )
        sequence = Group(request).leader
        sequence.tables = [[0] * -(-len(tokens) // config.block_size), *([[0]] if has_states else [])]
        return Chunk(sequence, start, length, sampled_sequences=(sequence,))

    # A step repeats one sequence instead of several equal ones: all would have the same block.
    for context in (*(context for context in CONTEXTS if context < longest), longest):
        yield WarmUpStep(Plan((chunk(context - 1, 1),) * min(DECODE_ROWS, config.max_num_seqs)))
    for choice, length in itertools.product(CHOICES, (1, *lengths)):
        yield WarmUpStep(Plan((chunk(0, length),)), choice)
        for count in dict.fromkeys(min(rows, config.max_num_seqs - 1, budget - 1) for rows in SHARING_ROWS):
            if count:  # decode rows first, as the scheduler orders them, with enough context to share a prefix
                row = chunk(min(longest, max(CONTEXT, 2 * MIN_SAVED_TOKENS // max(1, count - 1))) - 1, 1)
                yield WarmUpStep(Plan((*(row,) * count, chunk(0, min(length, budget - count)))), choice)
    for count in _powers_of_two(min(MAX_SHARING_ROWS, config.max_num_seqs, budget)):
        yield WarmUpStep(Plan((chunk(min(CONTEXT, longest) - 1, 1),) * count))
    scored = min(MAX_SCORED, longest - 1, budget - 1)
    prompt = replace(chunk(0, scored + 1, prompt_logprobs=config.limits.max_logprobs), scored=range(scored))
    yield WarmUpStep(Plan((prompt,), has_prompt_outputs=True))
    for sampling in SAMPLINGS:
        if "logprobs" in sampling:
            sampling = sampling | {"logprobs": config.limits.max_logprobs}
        sampled = min(MAX_SAMPLED_ROWS, config.max_num_seqs * (1 + config.num_speculative_tokens))
        for count in dict.fromkeys(min(rows, sampled) for rows in launch_table.ROW_BUCKETS):
            yield WarmUpStep(Plan((chunk(0, 1, **sampling),) * count))


def _powers_of_two(most: int) -> list[int]:
    """Return the powers of two from 2 to `most`, and `most` itself."""
    return list(dict.fromkeys(min(2**power, most) for power in range(1, most.bit_length() + 1)))


def _activation_bytes(steps: Callable[[], None], device: torch.device) -> int:
    """Return the peak GPU memory that steps allocate in addition. Earlier peaks of the process, such as loading the
    model, do not count."""
    if device.type != "cuda":
        steps()
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    steps()
    return torch.cuda.max_memory_allocated(device) - before


def graph_bytes(config: EngineConfig, loaded: LoadedModel, runner: Runner) -> int:
    """Return the GPU memory that all graphs will take.

    All graphs share the memory of the largest, and each takes a little of its own. To measure both, the largest graph
    of each kind is captured, then the two largest.
    """
    shapes, device = graph_shapes_of(config, runner), runner.kv.device
    if device.type != "cuda":
        return 0

    def count(some: list[GraphShape]) -> int:
        return len(some) + (len(draft_shapes(some)) if runner.drafter else 0)

    def measure(some: list[GraphShape]) -> int:
        before = _free_bytes(device)
        capture_graphs(config, loaded, runner, some)
        after = _free_bytes(device)
        runner.release_graphs()
        return max(0, before - after)

    first, second = largest_shapes(shapes, 1), largest_shapes(shapes, 2)
    measure(first)  # excludes from later captures what the first one allocates permanently
    shared = measure(first)
    if second == first:
        return shared
    more = max(0, measure(second) - shared)
    return shared + more * (count(shapes) - count(first)) // (count(second) - count(first))


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()  # now, because a capture does it as well, which would be measured
    return torch.cuda.mem_get_info(device)[0]


def measure_decode(config: EngineConfig, loaded: LoadedModel, runner: Runner) -> float:
    """Measure the seconds of a decode step of a few sequences. Called before any request, as it overwrites block 0."""
    plan = next(_steps_of(config, loaded.spec)).plan

    def step() -> None:
        runner.launch(_pack(plan, config, runner)).result()

    return _median_seconds(step, runner.kv.device)


def measure_costs(runner: Runner, seconds_per_token: float, num_host_blocks: int) -> Costs:
    """Measure the costs that decide between swapping and recomputing. Called before any request, as it overwrites the
    first pages."""
    num_blocks = len(runner.kv.layers[0].keys)

    def transfers(count: int, shift: int = 0) -> tuple[Transfer, ...]:
        """Return transfers of the first `count` blocks, each to the block `shift` later."""
        return tuple(Transfer(block, block + shift, pages=((block, block + shift),)) for block in range(count))

    def seconds(plan: Plan) -> float:
        return _median_seconds(lambda: runner.move(plan), runner.kv.device)

    move = copy = 0.0
    if count := min(MEASURED_BLOCKS, num_host_blocks, num_blocks):
        move = seconds(Plan(transfers=Transfers(transfers(count), transfers(count)))) / 2 / count
    if count := min(MEASURED_BLOCKS, num_blocks // 2):
        copy = seconds(Plan(transfers=Transfers(copies=transfers(count, shift=count)))) / count
    return Costs(token=seconds_per_token, copy=copy, move=move)


def _median_seconds(action: Callable[[], None], device: torch.device) -> float:
    action()  # not measured: the first run touches new memory
    return statistics.median(_seconds(action, device) for _ in range(REPEATS))


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def distinct_layers(model: PreTrainedModel) -> Iterator[int]:
    """Make the model run only its first layers, which include a layer of each kind. Yields their number.

    Layers of one kind launch the same kernels. The first layer is a kind of its own, since fused layers add a residual
    from the second one on. The outputs are meaningless. A model whose list of layers is not found runs all of them.
    """
    owner, name, layers = _layer_list(model)
    if owner is None:
        yield 0
        return
    kinds = [(index == 0, _kind_of(layer)) for index, layer in enumerate(layers)]
    count = 1 + max(map(kinds.index, kinds))
    setattr(owner, name, nn.ModuleList(list(layers)[:count]))
    try:
        yield count
    finally:
        setattr(owner, name, layers)


def _layer_list(model: PreTrainedModel) -> tuple[nn.Module | None, str, nn.ModuleList]:
    """Return the module that owns the list of decoder layers, the list's name, and the list."""
    total = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == total > 0:
                return module, name, child
    return None, "", nn.ModuleList()


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return the properties of the modules and parameters of a layer that its kernels may depend on."""
    modules = [(name, type(module), _settings(module)) for name, module in layer.named_modules()]
    parameters = [(name, value.shape, value.dtype) for name, value in layer.named_parameters()]
    return (*modules, *parameters)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | str | None)}
    return tuple(sorted((name, repr(value)) for name, value in plain.items() if name != "layer_idx"))
