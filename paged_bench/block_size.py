"""Measure what depends on the block size: attention, the scheduler's bookkeeping, and slots that hold no token.

`block_size=auto` compares block sizes by these figures (paged_backend/engine/block_size.py). Attention is that of one
layer, whose block tables are shuffled and whose keys and values are not in the caches: 16 decoding sequences with 2,048
tokens each, with the heads of Llama 3.1 8B and with the latents of DeepSeek V2 Lite, and a prompt of 2,048 tokens.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import torch

from paged_backend.api.config import AUTO_BLOCK_SIZES, EngineConfig
from paged_backend.engine.block_size import BATCH, CONTEXT, waste
from paged_backend.kv.cache import CacheLayout, CacheSpec, KVCache, LayerShape
from paged_backend.loading.description import pick_dtype
from paged_backend.models.linear import WeightPacker, project
from paged_bench._harness import Bars, Benchmark, Contest, Lines, Record, alternate, figures, rounds_option
from paged_bench._timing import cache_bytes, timer
from paged_bench.memory import MODELS, decoding
from paged_kernels.ops import paged_attention
from paged_kernels.paging import Paging

SIZES = AUTO_BLOCK_SIZES
HEADS, LATENT = LayerShape(8, 128), LayerShape(1, 576, 512, latent=True)
QUERIES = {HEADS: 32, LATENT: 16}  # heads of a query
WEIGHT = (14_336, 4096)  # outputs and inputs of a linear layer of Llama 3.1 8B
RUNNING = 256  # sequences of the bookkeeping
MEMORY = 1 << 30  # maximum bytes of all copies of keys and values


class Problem:
    """The attention of one layer, for any block size in the same memory.

    Args:
        batch: sequences of CONTEXT tokens each.
        query: tokens of each that are computed.
        copies: number of copies of the keys and values.
    """

    def __init__(
        self, shape: LayerShape, dtype: torch.dtype, device: torch.device, batch: int, query: int, copies: int
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.batch, self.query, self.copies = batch, query, copies
        layout = CacheLayout.of([shape], SIZES[0], dtype)
        self.memory = KVCache.allocate(layout, copies * batch * CONTEXT // SIZES[0], device).memory
        self.memory.view(dtype).normal_()
        self.nbytes = self.memory.nbytes // copies

    def speed(self, seconds: float) -> float:
        """Return the GB/s at which keys and values are read in this time."""
        return self.nbytes / seconds / 1e9

    def attention(self, size: int) -> Callable[[], float]:
        """Return a function that measures the attention with blocks of `size` tokens."""
        pages = self.memory.view(self.copies * self.batch * CONTEXT // size, -1)
        cache = self.shape.cache(pages, 0, size, self.dtype)
        tables = torch.randperm(len(pages)).to(torch.int32).view(self.copies, self.batch, -1).to(self.device)
        lens = torch.full((self.batch,), CONTEXT, dtype=torch.int32, device=self.device)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * self.query
        slots = torch.zeros(self.batch * self.query, dtype=torch.int64, device=self.device)  # attention reads none
        pagings = [Paging(slots, table, lens, starts, self.query, CONTEXT) for table in tables]
        query = torch.randn(len(slots), QUERIES[self.shape], self.shape.head_dim, dtype=self.dtype, device=self.device)
        scale = self.shape.head_dim**-0.5
        return timer(lambda index: paged_attention(query, cache, pagings[index], scale=scale), self.copies, self.device)


def attention(device: torch.device, rounds: int) -> Iterator[Record]:
    """Measure the speed of attention by block size, and that of a linear layer, which reads weights."""
    dtype = pick_dtype("auto", torch.bfloat16, device)
    for name, shape in (("heads", HEADS), ("latents", LATENT)):
        problem = _problem(shape, dtype, device, BATCH, 1)
        contest = alternate(by_size(problem.attention), rounds, quiet=True)
        yield from quiet_rounds(contest, f"decode, {name}, {{}}", "GB/s", problem.speed)
    prompt = by_size(_problem(HEADS, dtype, device, 1, CONTEXT).attention)
    yield from quiet_rounds(alternate(prompt, rounds, quiet=True), "prefill, {}", "ms", lambda time: 1e3 * time)
    # Not beside attention: threads of other libraries stay busy for a while after a call.
    weights = alternate({"weights": linear(dtype, device)}, rounds, quiet=True)
    yield from quiet_rounds(weights, "linear layer, {}", "GB/s", lambda time: 1 / time)


def linear(dtype: torch.dtype, device: torch.device) -> Callable[[], float]:
    """Return a function that measures the seconds in which a linear layer of BATCH rows reads a GB of weights."""
    outputs, inputs = WEIGHT
    size = outputs * inputs * dtype.itemsize
    pack = WeightPacker() if device.type == "cpu" else lambda weight: weight
    copies = _copies(size, device)
    weights = [pack(torch.randn(outputs, inputs, dtype=dtype, device=device)) for _ in range(copies)]
    rows = torch.randn(BATCH, inputs, dtype=dtype, device=device)
    seconds = timer(lambda index: project(rows, weights[index], None), copies, device)
    return lambda: 1e9 * seconds() / size


def by_size(make: Callable[[int], Callable[[], float]]) -> dict[str, Callable[[], float]]:
    """Return a contestant for each block size."""
    return {f"block_size={size}": make(size) for size in SIZES}


def quiet_rounds(contest: Contest[float], label: str, unit: str, show: Callable[[float], float]) -> Iterator[Record]:
    """Yield a record of each contestant: the median of the quarter of rounds that were shortest in all. In the others,
    other processes may have slowed down some of the contestants.

    show: returns the figure of a time.
    """
    rounds = sorted(zip(*contest.figures.values(), strict=True), key=sum)
    for name, times in zip(contest.figures, zip(*rounds[: -(-len(rounds) // 4)], strict=True), strict=True):
        yield Record(label.format(name), show(statistics.median(times)), unit)


def _copies(nbytes: int, device: torch.device) -> int:
    """Return how many copies of data are read in turn, so that a copy has left the caches when it is read again."""
    return max(1, min(2 * cache_bytes(device), MEMORY) // nbytes)


def _problem(shape: LayerShape, dtype: torch.dtype, device: torch.device, batch: int, query: int) -> Problem:
    copies = _copies(batch * CONTEXT * shape.page_bytes(1, dtype), device) if query == 1 else 1
    return Problem(shape, dtype, device, batch, query, copies)


def bookkeeping(rounds: int) -> Iterator[Record]:
    """Measure the time of schedule and commit by block size."""
    steps = by_size(lambda size: decoding(size, RUNNING, CONTEXT // 2, rounds))
    yield from quiet_rounds(alternate(steps, rounds, quiet=True), "bookkeeping, {}", "us/sequence/step", float)


def wasted() -> Iterator[Record]:
    """Calculate the memory that sequences hold beyond what their tokens need, by model and block size."""
    for model in MODELS:
        cache = CacheSpec(model.layers, model.states, torch.bfloat16, 1 << 17)
        config = EngineConfig(model=model.name)
        for size in SIZES:
            yield Record(f"waste, {model.name}, block_size={size}", 100 * waste(config, cache, size), "%")


def measure(args: Namespace) -> Iterator[Record]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from attention(device, args.rounds)
    yield from bookkeeping(args.rounds)
    yield from wasted()


def panels(records: Sequence[Record]) -> Iterator[Bars | Lines]:
    def lines(*names: str) -> dict[str, dict[float, float]]:
        by_name = {name: figures(records, rf"{name}, block_size=(\d+)") for name in names}
        return {name: {float(size): value for size, value in line.items()} for name, line in by_name.items()}

    below = "tokens per block"
    yield Lines("attention of decoding sequences, GB/s", lines("decode, heads", "decode, latents"), below)
    yield Lines("schedule and commit, us for a sequence and step", lines("bookkeeping"), below)
    models = ("Gemma 3 27B", "DeepSeek V3", "Qwen3-Next 80B")
    yield Lines("memory beyond what tokens need, %", lines(*(f"waste, {name}" for name in models)), below)


main = Benchmark(__doc__, measure, panels, options=(rounds_option(61),), quick={"rounds": 3})
