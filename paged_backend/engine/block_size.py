"""Chooses the block size that the option `block_size=auto` stands for.

A pool has one block size, in tokens. It sets the bytes of a page, which all kinds of layers share (kv/cache.py). Larger
blocks make attention faster; smaller ones leave fewer slots without a token, so that more sequences fit into a pool.
The choice is the size with the least cost:

    step   time of a step of 16 sequences with 2,048 tokens: reading the weights, attention, and bookkeeping
    waste  memory that sequences hold beyond what their tokens need, with the lengths of ShareGPT
    cost   step * (1 + waste): a pool has room for 1 / (1 + waste) as many sequences, each of which waits for the step

The default is kept unless another size costs 1% less: the measured times vary by more between runs.

The times come from a table that `paged bench block_size` measured, not from the machine. So the choice depends on the
model, the options and the kind of device alone, and servers that share cached blocks make the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import torch

from paged_backend.api.config import AUTO_BLOCK_SIZES, DEFAULT_BLOCK_SIZE, INT4_BLOCK_SIZE, EngineConfig
from paged_backend.engine.model_preparation import rank_cache
from paged_backend.engine.pools import PoolSizing
from paged_backend.files.start_checks import ROOT
from paged_backend.kv.cache import CacheSpec, state_nbytes
from paged_backend.loading.description import Description, describe, pick_device
from paged_backend.utils.startup import startup_log

BATCH, CONTEXT = 16, 2048  # sequences of a step and their tokens, at which attention is measured
MARGIN = 0.01
# Tokens of running sequences with the lengths of ShareGPT: about log-normal, with a median of 353 and this spread.
LENGTHS = [round(353 * math.exp(0.78 * NormalDist().inv_cdf((index + 0.5) / 400))) for index in range(400)]


@dataclass(frozen=True)
class Curve:
    """What a kind of device has measured. The tables are by block size."""

    measured: str  # on what, and when
    read: float  # bytes/s at which weights are read
    heads: Mapping[int, float]  # bytes/s at which attention reads keys and values
    latents: Mapping[int, float]  # the same for latents, which the heads of a query share
    bookkeeping: Mapping[int, float]  # seconds of schedule and commit for a sequence of a step


def _table(*values: float) -> Mapping[int, float]:
    return dict(zip(AUTO_BLOCK_SIZES, values, strict=True))


# From docs/results/block_size.json, by kind of device. Kinds without an entry are not measured.
CURVES: Mapping[str, Curve] = {
    "cpu": Curve(
        "2 cores of an Intel Xeon with AMX, 2026-11-28",
        read=3.475e9,
        heads=_table(5.002e9, 5.474e9, 5.659e9, 5.892e9, 5.884e9),
        latents=_table(2.878e9, 2.946e9, 2.978e9, 3.013e9, 3.079e9),
        bookkeeping=_table(12.01e-6, 12.74e-6, 12.07e-6, 12.17e-6, 12.17e-6),
    ),
}


class Choice(NamedTuple):
    """A block size, and why it was chosen."""

    block_size: int
    reasons: str


def choose_block_size(config: EngineConfig, cache: CacheSpec | None, weight_bytes: float, device: str) -> Choice:
    """Return the block size with the least cost, or the default if it costs little more.

    Args:
        cache: what a rank keeps of sequences; None if it is not known.
        weight_bytes: weights that a rank reads in a step.
        device: cpu or cuda.
    """
    if config.packs_blocks:
        return Choice(INT4_BLOCK_SIZE, 'the only size with kv_cache_dtype="int4"')
    curve = CURVES.get(device)
    if curve is None:
        return Choice(DEFAULT_BLOCK_SIZE, f"the default, because attention is not measured on this device ({device})")
    if cache is None or not cache.token_bytes(1):
        kept = "nothing" if cache else "nothing, or only shows what once it is loaded"
        return Choice(DEFAULT_BLOCK_SIZE, f"the default, because the model keeps {kept}")
    steps = {size: step_seconds(curve, cache, weight_bytes, size) for size in AUTO_BLOCK_SIZES}
    unused = {size: waste(config, cache, size) for size in AUTO_BLOCK_SIZES}
    costs = {size: steps[size] * (1 + unused[size]) for size in AUTO_BLOCK_SIZES}
    best = min(costs, key=costs.__getitem__)
    if costs[best] > (1 - MARGIN) * costs[DEFAULT_BLOCK_SIZE]:
        best = DEFAULT_BLOCK_SIZE
    compared = "; ".join(
        f"{size}: {1e3 * steps[size]:.4g} ms, {100 * unused[size]:.1f}% waste, cost {costs[size] / costs[best]:.3f}"
        for size in AUTO_BLOCK_SIZES
    )
    return Choice(best, f"compared by step time and waste of memory ({compared}; times of {curve.measured})")


def step_seconds(curve: Curve, cache: CacheSpec, weight_bytes: float, size: int) -> float:
    """Return the time of a step of BATCH sequences with blocks of `size` tokens."""
    context, attention = min(CONTEXT, cache.max_model_len), 0.0
    for layer in cache.layers:
        speed = (curve.latents if layer.latent else curve.heads)[size]
        attention += layer.context_bytes(context, cache.kv_dtype) / speed
    return weight_bytes / curve.read + BATCH * (attention + curve.bookkeeping[size])


def waste(config: EngineConfig, cache: CacheSpec, size: int) -> float:
    """Return the memory that sequences hold beyond what they need for their next token, as a share of it: empty slots
    of blocks, tokens that have left a window, and the padding of pages."""
    layout = PoolSizing(replace(config, block_size=size), cache, torch.device("cpu")).layout
    lengths = [length for length in LENGTHS if length <= cache.max_model_len] or range(1, cache.max_model_len + 1)
    held = sum(map(layout.blocks.held, lengths)) * layout.page_bytes
    return held / (sum(map(cache.token_bytes, lengths)) + len(lengths) * state_nbytes(cache.states)) - 1


def resolve_block_size(config: EngineConfig) -> EngineConfig:
    """Return the options with the number that `block_size=auto` stands for, and log why. Called before other
    ranks and replicas start, which get the number. Raises ConfigError for a model that cannot be described."""
    if not config.chooses_block_size:
        return config
    device = pick_device(config)
    choice = choice_for(config, describe(config, ROOT, device), device.type)
    startup_log.info("Block size: %d tokens, %s", *choice)
    return replace(config, block_size=choice.block_size)


def choice_for(config: EngineConfig, described: Description, device: str) -> Choice:
    """Return the choice for a model that is not loaded. device: cpu or cuda."""
    cache = described.cache and rank_cache(config, described.cache)
    return choose_block_size(config, cache, described.read_bytes(BATCH) / config.num_ranks, device)
