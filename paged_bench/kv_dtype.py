"""Measure the accuracy and the speed of KV caches with one byte per value, relative to fp32.

The next-token distributions at every position of a text are compared between KV caches of each data type, in
independent windows. The text is this project's documentation and source code.
"""

from __future__ import annotations

import math
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution.batch import pack
from paged_backend.execution.forward import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.files.start_checks import ROOT
from paged_backend.loading.model_options import pick_kv_dtype
from paged_backend.memory import kv_cache
from paged_backend.memory.kv_cache import KVCache
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish
from paged_client.serving.repository import resolve_model
from paged_kernels.ops import kv_write, paged_attention
from paged_kernels.paging import Paging

BLOCK_SIZE = 16
TYPES = ("auto", "fp8", "int8")  # the first one is the reference
DECODING, CONTEXT = 8, 1024  # number of sequences and their context length, where attention is timed


@dataclass
class Score:
    """Sums over all positions that have a next token in their window."""

    positions: int = 0
    divergence: float = 0.0  # sum of KL(auto, this one), in nats
    agreed: int = 0  # number of positions with the same top token as `auto`
    surprise: float = 0.0  # sum of -log p(the text's next token)

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
        self.surprise -= float(found.gather(1, following[:, None]).sum())


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
    sequence.blocks = list(range(-(-len(window) // BLOCK_SIZE)))
    packed = pack(Plan((Chunk(sequence, 0, len(window), sampled_sequences=()),)), block_size=BLOCK_SIZE)
    batch = DeviceUpload(assembly.device)(packed)
    every = torch.arange(len(window), device=assembly.device)
    return paged_logits(assembly.loaded.model, replace(batch, sample_rows=every), pool).float().log_softmax(-1)


def measure(assembly: Assembly, batches: Sequence[list[int]]) -> tuple[dict[str, Score], dict[str, int]]:
    """Return scores and bytes per token, by `kv_cache_dtype`."""
    spec = assembly.loaded.spec
    types = {name: pick_kv_dtype(name, spec.dtype) for name in TYPES}
    pools = {
        name: KVCache.allocate(
            spec.layers,
            num_blocks=-(-len(batches[0]) // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=assembly.device,
        )
        for name, dtype in types.items()
    }
    scores = {name: Score() for name in TYPES}
    for window in batches:
        following = torch.tensor(window[1:], device=assembly.device)
        found = {name: log_probabilities(assembly, pool, window)[:-1] for name, pool in pools.items()}
        for name, score in scores.items():
            score.add(found[name], found[TYPES[0]], following)
    return scores, {name: kv_cache.bytes_per_block(spec.layers, 1, dtype) for name, dtype in types.items()}


def attention(assembly: Assembly, dtype: torch.dtype, rounds: int) -> Iterator[Record]:
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
        pool = KVCache.allocate(
            [shape],
            num_blocks=DECODING * width,
            block_size=BLOCK_SIZE,
            dtype=pick_kv_dtype(name, dtype),
            device=device,
        )
        (cache,) = pool.layers
        kv_write(key, value, cache, paging.slots)

        def once() -> float:
            started = time.perf_counter()
            for _ in range(5):
                paged_attention(query, cache, paging, scale=shape.head_dim**-0.5)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - started) / 5 * 1e3

        once()
        return once

    figures = alternate({name: timed(name) for name in TYPES}, rounds)
    of = str(dtype).removeprefix("torch.")
    for name, found in figures.items():
        yield Record(f"attention {name} in {of}", statistics.median(found), "ms/layer")


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"windows": 4, "length": 128})
    options = {"model": resolve_model(args.model), "dtype": "float32", "num_gpu_blocks_override": 64}
    assembly = assemble(EngineConfig.from_options(options))
    longest = min(assembly.limits.max_model_len, assembly.limits.num_blocks * assembly.limits.block_size)
    if args.length > longest:
        _parser().error(f"argument --length: {args.length}: must be at most {longest}, as long as a sequence can be")
    scores, held = measure(assembly, windows(assembly, args.windows, args.length))
    print(f"{args.windows} windows of {args.length} tokens, {scores[TYPES[0]].positions} next tokens")
    records = Records(args)
    for name, score in scores.items():
        records += [
            Record(f"bytes per token {name}", held[name], "bytes", peers={"bfloat16": held["auto"] / 2}),
            Record(f"KL divergence {name}", score.divergence / score.positions, "nats", limit=0.0),
            Record(f"same top token {name}", 100 * score.agreed / score.positions, "%", limit=100.0),
            Record(f"perplexity {name}", math.exp(score.surprise / score.positions), ""),
        ]
    for dtype in (torch.float32, torch.bfloat16):
        records += attention(assembly, dtype, 3 if args.quick else 9)
    publish(records, lambda file, caption: draw(records, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("kv_dtype", __doc__)
    made.add_argument("--model", default="demo", help="Hugging Face model directory (default: demo)")
    made.add_argument("--windows", type=count, default=32, metavar="N", help="number of windows (default: 32)")
    made.add_argument("--length", type=count, default=512, metavar="N", help="tokens of a window (default: 512)")
    return made


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    value = {record.name: record.value for record in records}
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    panels = {
        "bytes per token": "bytes per token",
        "KL divergence": "KL divergence from fp32, nats",
        "same top token": "same top token as fp32, %",
        "perplexity": "perplexity",
    }
    for axes, (name, title) in zip(figure.subplots(1, 4), panels.items(), strict=True):
        bars = axes.bar(
            [kind if kind != "auto" else "float32" for kind in TYPES],
            [value[f"{name} {kind}"] for kind in TYPES],
            color=["#b0b0b0", "#76b900", "#76b900"],
        )
        axes.bar_label(bars, fmt="{:,.4g}" if name != "bytes per token" else "{:,.0f}", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, -0.08, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
