"""What fits a GPU or CPU, and about how fast it runs, from a model's configuration: `paged plan`.

A time is the larger of the time for reading memory and the time for arithmetic, at the given rates. It is a lower
bound: launches, activations and communication come on top.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.sizes import GIB
from paged_backend.distributed.topology import Topology
from paged_backend.engine.block_size import choice_for
from paged_backend.engine.model_preparation import rank_bytes, rank_cache
from paged_backend.engine.pools import PoolSizing
from paged_backend.files.start_checks import ROOT, find_local
from paged_backend.kv.cache import CacheSpec
from paged_backend.loading.description import Description, describe
from paged_backend.utils.machine import available_memory

CONTEXTS = tuple(2**power for power in range(10, 22, 2))  # 1,024 to 1,048,576 tokens


@dataclass(frozen=True)
class Device:
    """The memory and speed of one GPU, or of a machine without one."""

    kind: str  # cuda or cpu
    memory: int  # bytes
    bandwidth: float | None = None  # bytes per second; None: not known
    flops: float | None = None  # operations per second


@dataclass(frozen=True)
class Row:
    """What fits and how long it takes, for requests of one length."""

    context: int
    requests: int  # requests that the KV cache has room for
    batch: int  # requests that run in one step, at most max_num_seqs
    step_ms: float | None  # time of a step that generates a token for each request of the batch
    prefill_ms: float | None  # time of the prompt of one request


@dataclass(frozen=True)
class Plan:
    """What fits, in bytes per rank."""

    model: str
    parameters: int
    dtype: str
    ranks: int
    usable_bytes: int
    weight_bytes: int
    pool_bytes: int  # 0: the model does not fit
    kv_bytes_per_token: int
    block_size: int
    block_size_reasons: str | None  # why `auto` stands for this size; None if the option is a number
    rows: tuple[Row, ...]


def plan(config: EngineConfig, device: Device, contexts: Sequence[int] = ()) -> Plan:
    """Return what fits. contexts: lengths of requests. Raises ConfigError for a model that cannot be described."""
    config = replace(config, nnodes=Topology.of(config).num_nodes)
    if find_local(config.model, ROOT) is None:
        config = replace(config, load_format="dummy")  # downloads the configuration, not the weights
    described = describe(config, ROOT, torch.device(device.kind))
    weights, usable = rank_bytes(config, described), device.memory
    if device.kind == "cuda":
        usable = int(usable * config.gpu_memory_utilization)
    if described.cache is None:
        raise ConfigError(
            f"{described.source.path}: {described.name} keeps no tokens, or only shows what once it is loaded"
        )
    choice = choice_for(config, described, device.kind) if config.chooses_block_size else None
    if choice:
        config = replace(config, block_size=choice.block_size)
    cache = rank_cache(config, described.cache)
    sizing = PoolSizing(config, cache, torch.device(device.kind))
    blocks, page, free = sizing.layout.blocks, sizing.page_bytes, max(0, usable - weights)
    pool = min(free, sizing.pool_bytes(free))
    pages = pool // page if page else 0
    longest = cache.max_model_len
    lengths = contexts or [*(length for length in CONTEXTS if length < longest), longest]
    if too_long := next((length for length in lengths if length > longest), None):
        raise ConfigError(f"context={too_long}: must be at most {longest}, the context length of {described.name}")
    rows = []
    for length in lengths:
        fits = blocks.sequences(pages, length) if blocks.pages else config.max_num_seqs if free else 0
        batch = min(fits, config.max_num_seqs)
        rows.append(Row(length, fits, batch, *_times(config, described, device, cache, length, batch)))
    return Plan(
        model=described.name,
        parameters=described.num_parameters,
        dtype=str(described.dtype).removeprefix("torch."),
        ranks=config.num_ranks,
        usable_bytes=usable,
        weight_bytes=weights,
        pool_bytes=pool,
        kv_bytes_per_token=cache.token_bytes(1),
        block_size=config.block_size,
        block_size_reasons=choice.reasons if choice else None,
        rows=tuple(rows),
    )


def _times(
    config: EngineConfig, described: Description, device: Device, cache: CacheSpec, context: int, batch: int
) -> tuple[float | None, float | None]:
    """Return the milliseconds of a decode step and of the prompt of one request; None if they are not known."""
    if not batch or device.bandwidth is None:
        return None, None
    read = described.read_bytes(batch) / config.num_ranks + batch * cache.token_bytes(context)
    operations = 2 * described.num_active / config.num_ranks
    step = max(read / device.bandwidth, batch * operations / device.flops if device.flops else 0)
    return 1e3 * step, 1e3 * context * operations / device.flops if device.flops else None


def table(planned: Plan) -> str:
    """Return the plan as text."""
    lines = [
        f"{planned.model}: {planned.parameters / 1e9:.2f} billion parameters, {planned.dtype}",
        f"Memory{' of each rank' if planned.ranks > 1 else ''}: {planned.usable_bytes / GIB:.2f} GiB usable, weights"
        f" {planned.weight_bytes / GIB:.2f} GiB, KV cache {planned.pool_bytes / GIB:.2f} GiB"
        f" ({planned.kv_bytes_per_token / 1024:.1f} KiB per token)",
    ]
    if planned.block_size_reasons:
        lines.append(f"Block size: {planned.block_size} tokens, {planned.block_size_reasons}")
    if not planned.pool_bytes:
        return "\n".join([*lines, "The model does not fit."])
    lines += ["", f"{'context':>9}{'requests that fit':>20}{'in one step':>14}{'step ms':>10}{'prompt ms':>12}"]
    for row in planned.rows:
        times = [f"{'-' if ms is None else format(ms, '.3g')}" for ms in (row.step_ms, row.prefill_ms)]
        lines.append(f"{row.context:>9}{row.requests:>20}{row.batch:>14}{times[0]:>10}{times[1]:>12}")
    lines += ["", "Times are lower bounds by arithmetic, without launches, activations and communication."]
    if planned.rows and planned.rows[0].step_ms is None:
        lines[-1] = "Times need --gpu, or --bandwidth and --flops."
    return "\n".join(lines)


def main(arguments: Mapping[str, Any]) -> int:
    """Print the plan for the arguments of `paged plan`."""
    try:
        config = EngineConfig.from_options(arguments["options"])
        device = Device(**arguments["device"])
        if not device.memory:
            device = replace(device, memory=available_memory())
        planned = plan(config, device, arguments["contexts"])
    except ConfigError as error:
        print(f"paged plan: {error}", file=sys.stderr)
        return 1
    with suppress(BrokenPipeError):  # the reader has exited
        print(json.dumps(asdict(planned), indent=2) if arguments["json"] else table(planned), flush=True)
    return 0
