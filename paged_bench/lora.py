"""Measure the cost of LoRA adapters in a decode step: without adapters, with one, and with several.

The adapters have the maximum rank of the engine on every linear layer that supports them, which is the highest cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.options import DTYPES
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.execution.batch import pack
from paged_backend.models.peft_files import Factors
from paged_backend.scheduling.plan import Chunk, Plan
from paged_backend.scheduling.sequence import Group
from paged_bench import _chart
from paged_bench._report import Record, Records, alternate, arguments, count, parser, publish, ratio
from paged_client.serving.repository import resolve_model

BLOCK_SIZE = 16


def adapters_of(assembly: Assembly) -> list[Adapter]:
    """Return an adapter with small random weights for each slot, and load it there."""
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
    """Return a function that measures a decode step of `rows` sequences that use the adapters cyclically, in ms."""
    each, chunks = -(-context // BLOCK_SIZE), []
    for row in range(rows):
        request = GenerateRequest(row, (row,) * context, SamplingParams(temperature=0.0), 0, frozenset())
        one = Group(replace(request, adapter=adapters[row % len(adapters)] if adapters else None)).leader
        one.blocks = list(range(row * each, (row + 1) * each))
        chunks.append(Chunk(one, context - 1, 1, sampled_sequences=(one,)))
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
    add = made.add_argument
    add("--model", default="demo", help="Hugging Face model directory (default: demo)")
    add("--dtype", default="bfloat16", choices=sorted(DTYPES), help="data type of weights (default: bfloat16)")
    add("--rows", type=count, default=16, metavar="N", help="sequences of a step (default: 16)")
    add("--context", type=count, default=64, metavar="N", help="context length of a sequence (default: 64)")
    add("--adapters", type=count, default=4, metavar="N", help="maximum number of adapters in a step (default: 4)")
    add("--rank", type=count, default=16, metavar="N", help="rank of the adapters (default: 16)")
    add("--rounds", type=count, default=10, metavar="N", help="number of rounds (default: 10)")
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
    records = Records(args)
    records += [
        Record(f"step of {args.rows} rows, {name} adapters", statistics.median(each), "ms")
        for name, each in figures.items()
    ]
    records += [ratio(f"{name} adapters over none", figures[name], figures["0"]) for name in figures if name != "0"]
    publish(records, lambda file, caption: draw(records[: len(numbers)], file, caption))
    return 0


def draw(records: Sequence[Record], file: Path, caption: str) -> None:
    rows, _, _ = records[0].name.partition(", ")
    figure, (axes,) = _chart.panels(1, len(records))
    _chart.bars(axes, {record.name.partition(", ")[2]: record.value or 0.0 for record in records}, f"{rows}, ms")
    _chart.save(figure, file, caption)
