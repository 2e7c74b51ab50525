"""What LoRA adapters cost a decode step: all rows without one, all with the same one, and with several in turn.

The adapters have the highest rank that the engine was given, on every linear layer that may be adapted: the most that
any can cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from client.serving.repository import resolve_model
from paged_backend.api.config import DTYPES, EngineConfig
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution.batch import pack
from paged_backend.models.peft_files import Factors
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from paged_bench._report import Record, alternate, arguments, count, parser, publish, ratio

BLOCK_SIZE = 16


def adapters_of(assembly: Assembly) -> list[Adapter]:
    """One in each slot, of small random weights."""
    lora = assembly.loaded.lora
    assert lora
    made = []
    for slot in range(lora.slots):
        factors = {
            name: Factors(torch.randn(lora.rank, inputs) / 100, torch.randn(outputs, lora.rank) / 100)
            for name, (inputs, outputs) in lora.shapes.items()
        }
        made.append(Adapter(str(slot), bytes([slot]), lora.rank, factors))
        lora.load_slot(slot, made[-1])
    return made


def step(assembly: Assembly, adapters: Sequence[Adapter], rows: int, context: int, repeats: int) -> Callable[[], float]:
    """Median milliseconds of a step in which so many sequences decode, with these adapters in turn."""
    each, chunks = -(-context // BLOCK_SIZE), []
    for row in range(rows):
        request = GenerateRequest(row, (row,) * context, SamplingParams(temperature=0.0), 0, frozenset())
        one = Group.of(replace(request, adapter=adapters[row % len(adapters)] if adapters else None)).leader
        one.blocks = list(range(row * each, (row + 1) * each))
        chunks.append(Chunk(one, context - 1, 1, draws=(one,)))
    plan = Plan(tuple(chunks), adapters={one.digest: slot for slot, one in enumerate(adapters)})

    def once() -> float:
        started = time.perf_counter()
        assembly.runner.launch(pack(plan, block_size=BLOCK_SIZE)).result()
        return (time.perf_counter() - started) * 1e3

    def median() -> float:
        return statistics.median(once() for _ in range(repeats))

    return median


def main(argv: Sequence[str]) -> int:
    made = parser("lora", __doc__)
    made.add_argument("--model", default="demo", help="a Hugging Face directory, or 'demo'")
    made.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    made.add_argument("--rows", type=count, default=16, metavar="N", help="sequences of a step")
    made.add_argument("--context", type=count, default=64, metavar="N", help="tokens of a sequence")
    made.add_argument("--adapters", type=count, default=4, metavar="N", help="the most in a step")
    made.add_argument("--rank", type=count, default=16, metavar="N", help="of an adapter")
    made.add_argument("--rounds", type=count, default=10, metavar="N")
    args = arguments(made, argv, {"rounds": 3})
    options = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank, "max_num_seqs": args.rows}
    options |= {"model": resolve_model(args.model), "dtype": args.dtype, "block_size": BLOCK_SIZE}
    blocks = args.rows * -(-args.context // BLOCK_SIZE)
    assembly = assemble(EngineConfig.from_options(options | {"num_gpu_blocks_override": blocks}))
    adapters = adapters_of(assembly)
    numbers = sorted({0, 1, len(adapters)})
    contestants = {
        str(number): step(assembly, adapters[:number], args.rows, args.context, 5 if args.quick else 20)
        for number in numbers
    }
    for once in contestants.values():
        once()
    figures = alternate(contestants, args.rounds)
    records = [
        Record(f"step of {args.rows} rows, {name} adapters", statistics.median(each), "ms")
        for name, each in figures.items()
    ]
    records += [ratio(f"{name} adapters over none", figures[name], figures["0"]) for name in figures if name != "0"]
    publish(records, args.json, lambda file, caption: draw(records[: len(numbers)], file, caption))
    return 0


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([record.name for record in records], [record.value or 0 for record in records], color="#76b900")
    axes.bar_label(bars, fmt="{:,.4g} ms", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    figure.text(0, -0.08, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
