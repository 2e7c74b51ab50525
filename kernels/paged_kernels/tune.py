"""The tuner: times launch shapes of all kernels on this GPU, and writes the table from which launches take them.

    python -m paged_kernels.tune [--quick] [--table FILE] [--fresh]

An attention problem has decode rows or prefill chunks over shuffled blocks, in enough pools to exceed the L2 cache. For
any other kernel, the rows are in the cache, as if the previous launch of a step had written them. The calls are
replayed as one CUDA graph. Candidates that do not compile, that spill, or that differ from the reference are skipped.
Timings are kept in a journal beside the table, so that an interrupted run can be continued. Exits with 2 without a GPU.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from paged_kernels import launch, launch_table
from paged_kernels.launch_table import (
    CONFIGS,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    AnyKey,
    AnyTile,
    RowTile,
    RowTuningKey,
    Table,
    Tile,
    TuningKey,
    default_row_tile,
)
from paged_kernels.tuning_inputs import Problem, make_problem

LENGTHS = {"decode": (1024, 8192, 65536), "prefill": (64, 512, 4096)}
WIDTHS = {  # widths of rows, rounded up to a power of two, in models of 0.5B to 70B; an 8B model's come first
    "kv_write": (1024, 256, 512),
    "rope_kv_write": (4096, 1024, 2048, 8192),
    "norm_rope_kv_write": (4096, 1024, 2048, 8192),
    "add_rms_norm": (4096, 1024, 2048, 8192),
    "swiglu": (16384, 4096, 8192, 32768),
    "sampling": (131072, 32768, 65536, 262144),
    "block_copy": (32768, 8192, 16384),
}

Measure = Callable[[AnyKey, AnyTile], float | None]  # returns microseconds; None: does not compile, spills, or is wrong


def tuning_keys(*, quick: bool) -> list[AnyKey]:
    """Return the keys that a table has entries for, one of each kind first.

    quick: only keys of an 8B model, one of each row-wise kind and two of attention.
    """
    first = [TuningKey(kind, 128, 2, 16, False, LENGTHS[kind][1]) for kind in LENGTHS]
    rows = [
        RowTuningKey(kind, width, count)
        for position in range(max(map(len, WIDTHS.values())))
        for kind, widths in WIDTHS.items()
        for width in widths[position : position + 1]
        for count in (ROW_BUCKETS[-1:] if kind in ROW_COUNT_INVARIANT else ROW_BUCKETS)
    ]
    if quick:
        return [*first, *(key for key in rows if key.width == WIDTHS[key.kind][0] and key.rows == ROW_BUCKETS[-1])]
    every = [
        TuningKey(kind, block_d, 2, count, quantized, length)
        for kind, block_d, count, quantized in itertools.product(LENGTHS, (64, 128, 256), (16, 32, 64), (False, True))
        for length in LENGTHS[kind]
    ]
    return list(dict.fromkeys([*first, *rows, *every]))


def candidates(key: AnyKey) -> Iterator[AnyTile]:
    """Yield the tiles to time, including the default of every chip. The compiler decides which of them fit a chip."""
    yield from _row_candidates(key) if isinstance(key, RowTuningKey) else _attention_candidates(key)


def _row_candidates(key: RowTuningKey) -> Iterator[RowTile]:
    yield default_row_tile(key)
    whole_row, unit = key.kind == "add_rms_norm", 4 if key.kind == "block_copy" else 1
    per_thread = (4, 8, 16, 32, 64, 128) if whole_row else (4, 8, 16, 32)
    for count, num_warps in itertools.product(per_thread, (1, 2, 4, 8, 16)):
        elements = 32 * num_warps * count * unit
        if elements == key.width or (elements < key.width and not whole_row):
            yield RowTile(elements, num_warps)


def _attention_candidates(key: TuningKey) -> Iterator[Tile]:
    decode = key.kind == "decode"
    block_ms = (key.rows,) if decode else (64, 128)
    block_ns = (16, 32, 64, 128) if key.quantized and key.block_d > 128 else (32, 64, 128)
    warps = (2, 4, 8) if decode else (4, 8)
    for block_m, block_n, num_warps, num_stages in itertools.product(block_ms, block_ns, warps, (1, 2, 3, 4)):
        if block_m * block_n * num_stages * key.block_d <= 128 * 128 * 3 * 128:
            yield Tile(max(block_m, key.rows), block_n, num_warps, num_stages)


def read_journal(file: Path) -> dict[tuple[AnyKey, AnyTile], float | None]:
    """Read the timings of an interrupted run, and cut off an incomplete last line.

    Raises ValueError with file and line for any other damaged line.
    """
    text = file.read_text() if file.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        file.write_text(complete)
    timings = {}
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            entry = json.loads(line)
            timings[launch_table.read_entry(entry)] = entry["us"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {number}: not a timing ({error!r}); delete it to time it again") from error
    return timings


def tune(
    chip: str,
    keys: Sequence[AnyKey],
    measure: Measure,
    *,
    file: Path,
    machine: str,
    show: Callable[[str], None] = print,
) -> Table:
    """Time what the journal does not contain, and write the fastest tile of every key into the table.

    The table is written after each key, so that an interrupted run leaves a usable one. Entries for other keys stay.
    """
    journal = file.with_suffix(".journal")
    timings = read_journal(journal)
    entries = launch_table.read_table(file).entries() if file.exists() else []
    table = launch_table.make_table(chip, machine, entries)
    with journal.open("a") as lines:
        for index, key in enumerate(keys, 1):
            for tile in dict.fromkeys(candidates(key)):
                if (key, tile) in timings:
                    continue
                us = timings[key, tile] = measure(key, tile)
                lines.write(json.dumps({"for": vars(key), "tile": vars(tile), "us": us}) + "\n")
                lines.flush()
                show(f"[{index}/{len(keys)}] {key} {tile}: {'skipped' if us is None else f'{us:.1f} us'}")
            runs = {tile: us for (other, tile), us in timings.items() if other == key and us is not None}
            if runs:
                entries.append((key, min(runs, key=lambda tile: runs[tile])))
                table = launch_table.make_table(chip, machine, entries)
                launch_table.write_table(table, file)
    journal.unlink()
    return table


def measure_with(timer: Callable[[Callable[[], None]], float], device: torch.device, **options: Any) -> Measure:
    """Return a function that times all launches of one call with a given tile, in microseconds.

    timer: returns the microseconds of a function. options: keyword arguments of `make_problem`.
    """
    import triton

    last: list[tuple[AnyKey, Problem]] = []  # latest key and its inputs, reused for all candidates

    def measure(key: AnyKey, tile: AnyTile) -> float | None:
        if not last or last[0][0] != key:
            last.clear()  # frees memory before allocating
            last.append((key, make_problem(key, device, **options)))
        problem = last[0][1]
        launch_table.use_table(launch_table.make_table(launch.device_of(device).chip, None, [(key, tile)]))
        for output in problem.outputs:
            output.zero_()
        try:
            spills = any(getattr(planned.run(), "n_spills", 0) for planned in problem.plans[0]())
            if spills or not problem.is_correct():
                return None

            def run() -> None:
                for plan in problem.plans:
                    for planned in plan():
                        planned.run()

            return timer(run) / len(problem.plans)
        except (triton.CompilationError, triton.OutOfResources, RuntimeError):  # compiler passes raise RuntimeError
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises if a kernel failed, as all later launches would
            return None

    return measure


def graph_time(run: Callable[[], None]) -> float:
    """Return the microseconds of a function on a GPU, from replays of a CUDA graph."""
    import triton

    milliseconds: float = triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median")
    return milliseconds * 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time launch shapes and write this chip's table.")
    parser.add_argument("--quick", action="store_true", help="one key of each kernel only, two of attention")
    parser.add_argument("--table", type=Path, metavar="FILE", help="in place of the chip's file in configs")
    parser.add_argument("--fresh", action="store_true", help="ignore the timings of an interrupted run")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU found; launch shapes are timed on the chip that they are for", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    chip = launch.device_of(device).chip
    file = arguments.table or CONFIGS / f"{chip}.json"
    if arguments.fresh:
        file.with_suffix(".journal").unlink(missing_ok=True)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}"
    tune(chip, tuning_keys(quick=arguments.quick), measure_with(graph_time, device), file=file, machine=machine)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
