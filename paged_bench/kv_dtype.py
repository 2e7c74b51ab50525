"""Measure the accuracy and the speed of KV caches in eight and four bits, relative to fp32.

The next-token distributions at every position of a text are compared between KV caches of each data type, in
independent windows. The text is this project's documentation and source code.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly
from paged_backend.execution.batch import consecutive_page_tables, pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import CacheLayout, KVCache, bytes_per_token
from paged_backend.loading.description import pick_kv_dtype
from paged_backend.models.attention import AttentionMeta, scale_channels
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_bench._engine import load
from paged_bench._harness import (
    ROOT,
    Bars,
    Benchmark,
    InvalidArgument,
    Option,
    Record,
    alternate,
    figures,
    model_option,
)
from paged_bench._timing import timer
from paged_client.serving.repository import resolve_model
from paged_kernels.layer_cache import pack_full_blocks
from paged_kernels.ops import kv_write, paged_attention
from paged_kernels.paging import Paging

BLOCK_SIZE = 32  # that of int4
TYPES = ("auto", "fp8", "int8", "int4")  # the first is the reference
TARGET_SPEED = 1.2  # of attention with int4, compared with the type of the queries
DECODING, CONTEXT = 16, 2048  # number of sequences and their context length, where attention is timed
LAYERS = 8  # layers whose attention is timed in turn, so that keys and values are not in the processor's caches


class Target(NamedTuple):
    """What a type of keys and values must reach."""

    change: float | None = None  # nats, mean change of a log probability
    agreed: float | None = None  # %, positions with the same top token
    increase: float | None = None  # %, of the perplexity
    ratio: float | None = None  # tokens in the bytes of one in bfloat16


NO_TARGET = Target()
TARGETS = {"int8": Target(change=0.02), "int4": Target(agreed=95.0, increase=2.0, ratio=3.4)}


@dataclass
class Score:
    """The accuracy of a model: sums over all positions that have a next token in their window."""

    positions: int = 0
    divergence: float = 0.0  # sum of KL(auto, this type), in nats
    agreed: int = 0  # number of positions with the same top token as `auto`
    surprise: float = 0.0  # sum of -log p(the text's next token)
    change: float = 0.0  # sum of |change of log p(the text's next token)|
    largest: float = 0.0  # the largest such change

    def add(self, found: Tensor, expected: Tensor, following: Tensor) -> None:
        """Add the positions of a window.

        Args:
            found: log probabilities, [positions, vocab].
            expected: log probabilities of the reference, [positions, vocab].
            following: next tokens of the text, [positions].
        """
        self.positions += len(following)
        self.divergence += float((expected.exp() * (expected - found)).sum())
        self.agreed += int((found.argmax(-1) == expected.argmax(-1)).sum())
        own, other = (log_probs.gather(1, following[:, None]) for log_probs in (found, expected))
        self.surprise -= float(own.sum())
        self.change += float((own - other).abs().sum())
        self.largest = max(self.largest, float((own - other).abs().max()))

    def records(self, name: str, reference: Score, target: Target = NO_TARGET) -> Iterator[Record]:
        yield Record(f"KL divergence {name}", self.divergence / self.positions, "nats", limit=0.0)
        yield Record(f"same top token {name}", 100 * self.agreed / self.positions, "%", target.agreed, limit=100.0)
        yield Record(f"perplexity {name}", math.exp(self.surprise / self.positions), "")
        increase = 100 * (math.exp((self.surprise - reference.surprise) / self.positions) - 1)
        yield Record(f"increase of the perplexity {name}", increase, "%", target.increase, limit=0.0)
        change = self.change / self.positions
        yield Record(f"mean change of a log probability {name}", change, "nats", target.change, limit=0.0)
        yield Record(f"largest change of a log probability {name}", self.largest, "nats", limit=0.0)


def texts() -> Iterator[str]:
    for pattern in ("*.md", "kernels/*.md", "kernels/**/*.py", "paged_backend/**/*.py", "client/paged_client/*.py"):
        yield from (file.read_text() for file in sorted(ROOT.glob(pattern)))


def windows(assembly: Assembly, count: int, length: int) -> list[list[int]]:
    """Return `count` windows of `length` tokens, evenly spaced over the text."""
    tokenizer = assembly.loaded.tokenizer
    ids = [token for text in texts() for token in tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
    last = len(ids) - length
    return [ids[start : start + length] for start in (index * last // count for index in range(count))]


@torch.inference_mode()
def log_probabilities(assembly: Assembly, pool: KVCache, window: Sequence[int]) -> Tensor:  # [length, vocab]
    """Return the log probabilities of every position's next token, in one forward pass with a KV cache."""
    size = pool.layers[0].keys.shape[2]  # of a block
    request = GenerateRequest(0, tuple(window), SamplingParams(temperature=0.0), 0, frozenset())
    sequence = Group(request).leader
    sequence.tables = [list(range(-(-len(window) // size)))]
    plan = Plan((Chunk(sequence, 0, len(window), sampled_sequences=()),))
    packed = pack(plan, block_size=size, page_tables=consecutive_page_tables(pool.pages_per_block))
    batch = DeviceUpload(assembly.device)(packed)
    every = torch.arange(len(window), device=assembly.device)
    return paged_logits(assembly.loaded.model, replace(batch, sample_rows=every), pool).float().log_softmax(-1)


def accuracy(
    models: Mapping[str, tuple[Assembly, KVCache]], texts: Sequence[Sequence[int]], reference: str
) -> dict[str, Score]:
    """Compare the next-token distributions of models, each with its KV cache, with the reference's."""
    scores = {name: Score() for name in models}
    for window in texts:
        log_probs = {name: log_probabilities(*model, window)[:-1] for name, model in models.items()}
        following = torch.tensor(window[1:], device=log_probs[reference].device)
        for name, score in scores.items():
            score.add(log_probs[name], log_probs[reference], following)
    print(f"{len(texts)} windows of {len(texts[0])} tokens, {scores[reference].positions} next tokens")
    return scores


def attention(assembly: Assembly, dtype: torch.dtype, rounds: int) -> list[Record]:
    """Measure attention of one layer in a decode step, with the model's heads and queries of `dtype`, for each type."""
    shape, device = assembly.loaded.spec.layers[0], assembly.device
    heads = assembly.loaded.model.config.get_text_config().num_attention_heads
    width = CONTEXT // BLOCK_SIZE
    blocks = torch.randperm(DECODING * width, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    key, value = torch.randn(2, DECODING * CONTEXT, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
    query = torch.randn(DECODING, heads, shape.head_dim, device=device, dtype=dtype)

    def paging(page: int, count: int) -> Paging:
        """Return the addresses in one of `count` pages of each block. The slots are those of all tokens."""
        tables = (blocks * count + page).view(DECODING, width).to(device)
        slots = tables.long()[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)
        return Paging(
            slots=slots.flatten(),
            block_tables=tables,
            context_lens=torch.full((DECODING,), CONTEXT, dtype=torch.int32, device=device),
            query_starts=torch.arange(DECODING + 1, dtype=torch.int32, device=device),
            max_query_len=1,
            max_context_len=CONTEXT,
        )

    def timed(name: str) -> Callable[[], float]:
        layout = CacheLayout.of([shape] * LAYERS, BLOCK_SIZE, pick_kv_dtype(name, dtype))
        count = layout.blocks.token_pages
        pool = KVCache.allocate(layout, DECODING * width * count, device)
        meta = AttentionMeta(tuple(paging(page, count) for page in range(count)), pool)
        for layer, cache in enumerate(pool.layers):
            of_layer = meta.paging_of(layer)
            kv_write(key, value, cache, of_layer.slots)
            if of_layer.packed:
                pack_full_blocks(cache, of_layer.slots, of_layer.packed.slots)
        nothing = torch.full((DECODING,), -1, device=device)  # is written in a timed step
        meta = AttentionMeta(tuple(replace(one, slots=nothing) for one in meta.pagings), pool)

        def attend(index: int) -> Tensor:
            layer = index % LAYERS
            return paged_attention(query, pool.layers[layer], meta.paging_of(layer), scale=shape.head_dim**-0.5)

        seconds = timer(attend, LAYERS, device)
        return lambda: 1e3 * seconds()

    contest = alternate({name: timed(name) for name in TYPES}, rounds, label=f"attention, {{}} in {dtype}")
    name = str(dtype).removeprefix("torch.")
    speed = contest.ratio(f"speed of attention int4 / {name}", TYPES[0], "int4", TARGET_SPEED)
    return [*contest.records(f"attention {{}} in {name}", "ms/layer"), speed]


def measure(args: Namespace) -> Iterator[Record]:
    options = {"model": resolve_model(args.model), "dtype": "float32", "kv_cache_dtype": "int8"}
    assembly = load(options | {"num_gpu_blocks_override": 64})
    spec, limits = assembly.loaded.spec, assembly.limits
    longest = min(limits.max_model_len, limits.num_pages * limits.block_size)
    if args.length > longest:
        raise InvalidArgument(
            f"argument --length: {args.length}: must be at most {longest}, as long as a sequence can be"
        )
    types = {name: pick_kv_dtype(name, spec.dtype) for name in TYPES}
    blocks = -(-args.length // BLOCK_SIZE)
    layouts = {name: CacheLayout.of(spec.layers, BLOCK_SIZE, dtype) for name, dtype in types.items()}
    pools = {
        name: KVCache.allocate(layout, blocks * layout.blocks.token_pages, assembly.device)
        for name, layout in layouts.items()
    }
    for pool in pools.values():
        scale_channels(assembly.loaded.model, pool)
    models = {name: (assembly, pool) for name, pool in pools.items()}
    scores = accuracy(models, windows(assembly, args.windows, args.length), TYPES[0])
    held = {name: bytes_per_token(spec.layers, dtype) for name, dtype in types.items()}
    room: dict[int, dict[str, float]] = {}  # by length of sequences, whose newest block is not full
    for length in (CONTEXT - BLOCK_SIZE // 2, 4 * CONTEXT - BLOCK_SIZE // 2):
        used = {name: layout.blocks.held(length) * layout.page_bytes for name, layout in layouts.items()}
        room[length] = {name: used["auto"] / 2 / used[name] for name in layouts}
    for name, score in scores.items():
        target = TARGETS.get(name, NO_TARGET)
        yield Record(f"bytes per token {name}", held[name], "bytes", peers={"bfloat16": held["auto"] / 2})
        for length, times in room.items() if target.ratio else ():
            title = f"tokens in the bytes of bfloat16, in sequences of {length:,} {name}"
            yield Record(title, times[name], "x", target.ratio)
        yield from score.records(name, scores[TYPES[0]], target)
    for dtype in (torch.float32, torch.bfloat16):
        yield from attention(assembly, dtype, 3 if args.quick else 9)


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    for name, title in (
        ("bytes per token", "bytes per token"),
        ("KL divergence", "KL divergence from fp32, nats"),
        ("same (?:top|likeliest) token", "same top token as fp32, %"),
        ("mean change of a log probability", "mean change of a log probability, nats"),
    ):
        values = figures(records, f"{name} (.*)")
        yield Bars(title, {kind.replace("auto", "float32"): value for kind, value in values.items()}, grey=["float32"])


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--windows", "number of windows", 40),
        Option("--length", "tokens of a window", 512),
    ),
    quick={"windows": 4, "length": 128},
)
