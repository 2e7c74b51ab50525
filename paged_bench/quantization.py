"""Measure the accuracy of 8-bit and 4-bit weights relative to float32, and the duration of steps.

The method and the texts are those of `paged bench kv_dtype`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution.batch import pack
from paged_backend.execution.forward import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from paged_bench._report import Record, alternate, arguments, count, parser, publish
from paged_bench.kv_dtype import BLOCK_SIZE, Score, log_probabilities, windows
from paged_client.serving.repository import resolve_model

WEIGHTS: dict[str, dict[str, object]] = {  # the first one is the reference
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, groups of 128": {"dtype": "bfloat16", "quantization": "int4", "quantization_group_size": 128},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},  # groups of 32
}
ROWS = (1, 16, 256)  # tokens of the timed steps


def step(assembly: Assembly, rows: int) -> Callable[[], float]:
    """Return a function that measures a forward pass of `rows` prompt tokens, in ms."""
    request = GenerateRequest(0, (0,) * rows, SamplingParams(temperature=0.0), 0, frozenset())
    sequence = Group(request).leader
    sequence.blocks = list(range(-(-rows // BLOCK_SIZE)))
    batch = DeviceUpload(assembly.device)(
        pack(Plan((Chunk(sequence, 0, rows, sampled_sequences=(sequence,)),)), block_size=BLOCK_SIZE)
    )

    def once() -> float:
        started = time.perf_counter()
        paged_logits(assembly.loaded.model, batch, assembly.runner.kv)
        return (time.perf_counter() - started) * 1e3

    once()
    return once


def main(argv: Sequence[str]) -> int:
    made = parser("quantization", __doc__)
    made.add_argument("--model", default="demo", help="Hugging Face model directory (default: demo)")
    made.add_argument("--windows", type=count, default=32, metavar="N", help="number of windows (default: 32)")
    made.add_argument("--length", type=count, default=512, metavar="N", help="tokens of a window (default: 512)")
    args = arguments(made, argv, {"windows": 4, "length": 128})
    blocks = -(-max(args.length, *ROWS) // BLOCK_SIZE)
    common = {"model": resolve_model(args.model), "device": "cpu", "block_size": BLOCK_SIZE}
    common |= {"num_gpu_blocks_override": blocks}
    models = {name: assemble(EngineConfig.from_options(common | options)) for name, options in WEIGHTS.items()}
    base = models["float32"]
    longest = base.limits.max_model_len
    if args.length > longest:
        made.error(f"argument --length: {args.length}: must be at most {longest}, as long as a sequence can be")
    scores = {name: Score() for name in WEIGHTS}
    for window in windows(base, args.windows, args.length):
        following = torch.tensor(window[1:])
        found = {name: log_probabilities(one, one.runner.kv, window)[:-1] for name, one in models.items()}
        for name, score in scores.items():
            score.add(found[name], found["float32"], following)
    print(f"{args.windows} windows of {args.length} tokens, {scores['float32'].positions} next tokens")
    records = []
    for name, score in scores.items():
        records += [
            Record(f"KL divergence {name}", score.divergence / score.positions, "nats", limit=0.0),
            Record(f"same top token {name}", 100 * score.agreed / score.positions, "%", limit=100.0),
            Record(f"perplexity {name}", math.exp(score.surprise / score.positions), ""),
        ]
    for rows in (one for one in ROWS if one <= longest):
        figures = alternate({name: step(one, rows) for name, one in models.items()}, 3 if args.quick else 15)
        records += [Record(f"step of {rows} {name}", statistics.median(each), "ms") for name, each in figures.items()]
    publish(records, args.json, lambda file, caption: draw(records, file, caption))
    return 0


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    value = {record.name: record.value for record in records}
    panels = {
        "KL divergence": "KL divergence from float32, nats",
        "same top token": "same top token as float32, %",
        "perplexity": "perplexity",
    }
    panels |= {f"step of {rows}": f"a step of {rows} tokens, ms" for rows in ROWS if f"step of {rows} int8" in value}
    figure = Figure(figsize=(2.5 * len(panels), 2.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        bars = axes.bar(list(WEIGHTS), [value[f"{name} {kind}"] for kind in WEIGHTS], color="#76b900")
        axes.bar_label(bars, fmt="{:,.4g}", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, -0.08, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
