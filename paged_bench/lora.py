"""Measure the cost of LoRA adapters in a decode step: without adapters, with one, and with several.

The adapters have the maximum rank of the engine on every linear layer that supports them, which is the highest cost.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from paged_backend.api.config import DTYPES
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.assembly import Assembly
from paged_backend.execution.batch import pack
from paged_backend.models.peft_files import Factors
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_bench._engine import load
from paged_bench._harness import Bars, Benchmark, Option, Record, alternate, figures, model_option, rounds_option
from paged_client.serving.repository import resolve_model

BLOCK_SIZE = 16


def load_adapters(assembly: Assembly) -> list[Adapter]:
    """Load an adapter with small random weights into each slot."""
    lora = assembly.loaded.lora
    assert lora
    adapters = []
    for slot in range(lora.slots):
        factors = {
            name: Factors(torch.randn(lora.rank, inputs) / 100, torch.randn(outputs, lora.rank) / 100)
            for name, (inputs, outputs) in lora.shapes.items()
        }
        adapters.append(Adapter(str(slot), bytes([slot]), lora.rank, factors))
        lora.load_slot(slot, adapters[-1])
    return adapters


def decode_plan(adapters: Sequence[Adapter], rows: int, context: int) -> Plan:
    """Return a decode step of `rows` sequences that use the adapters cyclically."""
    width, chunks = -(-context // BLOCK_SIZE), []
    for row in range(rows):
        request = GenerateRequest(row, (row,) * context, SamplingParams(temperature=0.0), 0, frozenset())
        adapter = adapters[row % len(adapters)] if adapters else None
        sequence = Group(replace(request, adapter=adapter)).leader
        sequence.tables = [list(range(row * width, (row + 1) * width))]
        chunks.append(Chunk(sequence, context - 1, 1, sampled_sequences=(sequence,)))
    return Plan(tuple(chunks), adapters={adapter.digest: slot for slot, adapter in enumerate(adapters)})


def step_ms(assembly: Assembly, plan: Plan, repeats: int) -> float:
    """Return the median duration of a step, in ms."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        assembly.runner.launch(pack(plan, block_size=BLOCK_SIZE)).result()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def measure(args: Namespace) -> Iterator[Record]:
    options = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank, "max_num_seqs": args.rows}
    options |= {"model": resolve_model(args.model), "dtype": args.dtype, "block_size": BLOCK_SIZE}
    assembly = load(options | {"num_gpu_blocks_override": args.rows * -(-args.context // BLOCK_SIZE)})
    adapters, repeats = load_adapters(assembly), 5 if args.quick else 20
    contestants = {
        str(number): partial(step_ms, assembly, decode_plan(adapters[:number], args.rows, args.context), repeats)
        for number in sorted({0, 1, len(adapters)})
    }
    contest = alternate(contestants, args.rounds, warm_up=True)
    yield from contest.records(f"step of {args.rows} rows, {{}} adapters", "ms")
    yield from (contest.ratio(f"{number} adapters over none", number, "0") for number in contestants if number != "0")


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    yield Bars(f"{records[0].name.partition(', ')[0]}, ms", figures(records, "step of .*, (.*)"))


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(
        model_option(),
        Option("--dtype", "data type of weights", "bfloat16", choices=sorted(DTYPES)),
        Option("--rows", "sequences of a step", 16),
        Option("--context", "context length of a sequence", 64),
        Option("--adapters", "maximum number of adapters in a step", 4),
        Option("--rank", "rank of the adapters", 16),
        rounds_option(10),
    ),
    quick={"rounds": 3},
)
