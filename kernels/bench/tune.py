"""Times launch shapes of attention on this GPU and writes the table that launches are looked up in.

    python -m kernels.bench.tune [--quick] [--table FILE] [--fresh]

Every point of the table is decode rows or prefill chunks over randomly permuted blocks, in as many pools as the L2
cache cannot hold, replayed as one CUDA graph. Candidates that do not compile or that spill are skipped. What was timed
is kept in a journal beside the table, so that a run that was stopped goes on where it was. Exits with 2 without a GPU.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from kernels import launch
from kernels.launch import CONFIGS, Facts, Table, Tile
from kernels.layer_cache import LayerCache, quantize
from kernels.paging import Paging

NUM_KV_HEADS, BLOCK_SIZE = 8, 16
LENGTHS = {"decode": (1024, 8192, 65536), "prefill": (64, 512, 4096)}
Measure = Callable[[Facts, Tile], float | None]  # microseconds; None: does not run, or spills


def points(*, quick: bool) -> list[Facts]:
    """What a table has entries for. The quick ones are those of most models of 8B and less."""
    first = [Facts(kind, 128, 2, 16, False, LENGTHS[kind][1]) for kind in LENGTHS]
    if quick:
        return first
    every = [
        Facts(kind, block_d, 2, rows, quantized, length)
        for kind, block_d, rows, quantized in itertools.product(LENGTHS, (64, 128, 256), (16, 32, 64), (False, True))
        for length in LENGTHS[kind]
    ]
    return list(dict.fromkeys(first + every))


def candidates(facts: Facts) -> Iterator[Tile]:
    """The default of any chip is among them. Whether one fits a chip is for its compiler to say."""
    decode = facts.kind == "decode"
    block_ms = (facts.rows,) if decode else (64, 128)
    block_ns, warps = ((32, 64, 128), (2, 4, 8)) if decode else ((32, 64, 128), (4, 8))
    for block_m, block_n, num_warps, num_stages in itertools.product(block_ms, block_ns, warps, (1, 2, 3, 4)):
        if block_m * block_n * num_stages * facts.block_d <= 128 * 128 * 3 * 128:
            yield Tile(max(block_m, facts.rows), block_n, num_warps, num_stages)


def read_journal(file: Path) -> dict[tuple[Facts, Tile], float | None]:
    """Of a run that was stopped. A last line that was not written to its end is cut off."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    timed = {}
    for line in whole.splitlines():
        entry = json.loads(line)
        timed[Facts(**entry["for"]), Tile(**entry["tile"])] = entry["us"]
    return timed


def tune(
    chip: str, wanted: list[Facts], measure: Measure, *, file: Path, machine: str, show: Callable[[str], None] = print
) -> Table:
    """Times what the journal does not hold, and writes the fastest of every point over the table's former entry. The
    table is written after each point, so that a run that is stopped leaves one of what it has come to."""
    journal = file.with_suffix(".journal")
    timed = read_journal(journal)
    rows = launch.read_table(file).rows() if file.exists() else []
    table = launch.table_of(chip, machine, rows)
    with journal.open("a") as lines:
        for done, facts in enumerate(wanted, 1):
            for tile in dict.fromkeys(candidates(facts)):
                if (facts, tile) in timed:
                    continue
                us = timed[facts, tile] = measure(facts, tile)
                lines.write(json.dumps({"for": vars(facts), "tile": vars(tile), "us": us}) + "\n")
                lines.flush()
                show(f"[{done}/{len(wanted)}] {facts} {tile}: {'skipped' if us is None else f'{us:.1f} us'}")
            runs = {tile: us for (point, tile), us in timed.items() if point == facts and us is not None}
            if runs:
                rows.append((facts, min(runs, key=lambda tile: runs[tile])))
                table = launch.table_of(chip, machine, rows)
                launch.write_table(table, file)
    journal.unlink()
    return table


def _inputs(facts: Facts, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[LayerCache], Paging]:
    """A step of this kind over random blocks, and pools of more bytes than twice the L2 cache."""
    cuda = torch.device("cuda")
    decode = facts.kind == "decode"
    num_seqs = max(1, min(64, 2**20 // facts.length)) if decode else 4
    query_len, context_len = (1, facts.length) if decode else (facts.length, facts.length + 1024)
    group = 4 if facts.rows == 16 else facts.rows
    blocks = -(-context_len // BLOCK_SIZE)
    order = torch.randperm(num_seqs * blocks, device=cuda, dtype=torch.int32)
    shape = (len(order), NUM_KV_HEADS, BLOCK_SIZE, facts.block_d)
    pool_bytes = 2 * len(order) * NUM_KV_HEADS * BLOCK_SIZE * facts.block_d * (1 if facts.quantized else 2)
    copies = 1 + 2 * torch.cuda.get_device_properties(cuda).L2_cache_size // pool_bytes
    caches = []
    for _ in range(copies):
        keys, values = (torch.randn(shape, device=cuda, dtype=dtype) for _ in range(2))
        if facts.quantized:
            (keys, key_scales), (values, value_scales) = (quantize(x, torch.float8_e4m3fn) for x in (keys, values))
            caches.append(LayerCache(keys, values, key_scales, value_scales))
        else:
            caches.append(LayerCache(keys, values))
    paging = Paging(
        slots=torch.zeros(num_seqs * query_len, dtype=torch.int64, device=cuda),
        block_tables=order.view(num_seqs, blocks),
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32, device=cuda),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=cuda) * query_len,
        max_query_len=query_len,
        max_context_len=context_len,
    )
    query = torch.randn(num_seqs * query_len, NUM_KV_HEADS * group, facts.block_d, device=cuda, dtype=dtype)
    return query, caches, paging


def measure_on_gpu(chip: str) -> Measure:
    """Microseconds of one call, merge included, with the tile in place of the table's."""
    import triton

    from kernels import paged_attention as attention

    device = attention.device_of(torch.device("cuda"))
    last: list = []  # the inputs of one point serve all of its candidates

    def measure(facts: Facts, tile: Tile) -> float | None:
        if not last or last[0] != facts:
            last[:] = []
            last[:] = facts, _inputs(facts)
        query, caches, paging = last[1]
        launch.use_table(launch.table_of(chip, None, [(facts, tile)]))
        paging.derived.clear()
        settings = dict(scale=0.1, sliding_window=None, softcap=None, sinks=None, device=device)
        try:
            for planned in attention.plan_launch(torch.empty_like(query), query, caches[0], paging, **settings):
                if planned.kernel[planned.grid](**planned.arguments).n_spills:
                    return None

            def run() -> None:
                for cache in caches:
                    attention.paged_attention(query, cache, paging, scale=0.1)

            return triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1000 / len(caches)
        except (triton.CompilationError, triton.OutOfResources, RuntimeError):  # RuntimeError: a pass of the compiler
            torch.cuda.synchronize()  # raises where a kernel has failed: then so would all others in this process
            return None

    return measure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times launch shapes of attention and writes this chip's table.")
    parser.add_argument("--quick", action="store_true", help="two points only")
    parser.add_argument("--table", type=Path, metavar="FILE", help="instead of the chip's own in kernels/configs")
    parser.add_argument("--fresh", action="store_true", help="forget what a run that was stopped has timed")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU here; launch shapes are timed on the chip they are for", file=sys.stderr)
        return 2
    from kernels.paged_attention import device_of

    chip = device_of(torch.device("cuda")).chip
    file = arguments.table or CONFIGS / f"{chip}.json"
    if arguments.fresh:
        file.with_suffix(".journal").unlink(missing_ok=True)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}"
    tune(chip, points(quick=arguments.quick), measure_on_gpu(chip), file=file, machine=machine)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
