"""Measure the accuracy and the speed of KV caches with one byte per value, relative to fp32.

The next-token distributions at every position of a text are compared between KV caches of each data type, in
independent windows. The text is this project's documentation and source code.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import CacheLayout, KVCache, bytes_per_token
from paged_backend.loading.description import pick_kv_dtype
from paged_backend.models.attention import scale_channels
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
from paged_kernels.ops import kv_write, paged_attention
from paged_kernels.paging import Paging

BLOCK_SIZE = 16
TYPES = ("auto", "fp8", "int8")  # the first is the reference
TARGET_CHANGE = 0.02  # nats, mean change of a log probability with int8
DECODING, CONTEXT = 8, 1024  # number of sequences and their context length, where attention is timed


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

    def records(self, name: str) -> Iterator[Record]:
        yield Record(f"KL divergence {name}", self.divergence / self.positions, "nats", limit=0.0)
        yield Record(f"same top token {name}", 100 * self.agreed / self.positions, "%", limit=100.0)
        yield Record(f"perplexity {name}", math.exp(self.surprise / self.positions), "")
        target = TARGET_CHANGE if name == "int8" else None
        yield Record(
            f"mean change of a log probability {name}", self.change / self.positions, "nats", target, limit=0.0
        )
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
    request = GenerateRequest(0, tuple(window), SamplingParams(temperature=0.0), 0, frozenset())
    sequence = Group(request).leader
    sequence.tables = [list(range(-(-len(window) // BLOCK_SIZE)))]
    packed = pack(Plan((Chunk(sequence, 0, len(window), sampled_sequences=()),)), block_size=BLOCK_SIZE)
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
    paging = Paging(
        slots=torch.arange(DECODING * CONTEXT, device=device),
        block_tables=blocks.view(DECODING, width).to(device),
        context_lens=torch.full((DECODING,), CONTEXT, dtype=torch.int32, device=device),
        query_starts=torch.arange(DECODING + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=CONTEXT,
    )
    key, value = torch.randn(2, len(paging.slots), shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
    query = torch.randn(DECODING, heads, shape.head_dim, device=device, dtype=dtype)

    def timed(name: str) -> Callable[[], float]:
        kv_dtype = pick_kv_dtype(name, dtype)
        pool = KVCache.allocate(CacheLayout.of([shape], BLOCK_SIZE, kv_dtype), DECODING * width, device)
        (cache,) = pool.layers
        kv_write(key, value, cache, paging.slots)
        seconds = timer(lambda _: paged_attention(query, cache, paging, scale=shape.head_dim**-0.5), 1, device)
        return lambda: 1e3 * seconds()

    contest = alternate({name: timed(name) for name in TYPES}, rounds, label=f"attention, {{}} in {dtype}")
    return contest.records(f"attention {{}} in {str(dtype).removeprefix('torch.')}", "ms/layer")


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
    pools = {
        name: KVCache.allocate(CacheLayout.of(spec.layers, BLOCK_SIZE, dtype), blocks, assembly.device)
        for name, dtype in types.items()
    }
    for pool in pools.values():
        scale_channels(assembly.loaded.model, pool)
    models = {name: (assembly, pool) for name, pool in pools.items()}
    scores = accuracy(models, windows(assembly, args.windows, args.length), TYPES[0])
    held = {name: bytes_per_token(spec.layers, dtype) for name, dtype in types.items()}
    for name, score in scores.items():
        yield Record(f"bytes per token {name}", held[name], "bytes", peers={"bfloat16": held["auto"] / 2})
        yield from score.records(name)
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
        Option("--windows", "number of windows", 32),
        Option("--length", "tokens of a window", 512),
    ),
    quick={"windows": 4, "length": 128},
)
