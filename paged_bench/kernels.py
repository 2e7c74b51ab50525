"""Speed of every kernel relative to the limits of the machine, and of attention relative to other implementations.

Bytes and operations are the necessary ones: each key and value is read once, and nothing past the causal edge is
computed. The limits are a read-only stream and a matrix product, measured in the same run. Block tables are shuffled,
inputs rotate so that no cache holds them, contestants run round-robin, and every output is compared with attention in
fp32.
"""

from __future__ import annotations

import gc
import statistics
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paged_bench._attention import AttentionInputs, Cell, error
from paged_bench._attention_contestants import OURS, UNQUANTIZED, Unavailable, contestants, targets
from paged_bench._lines import LINES
from paged_bench._race import Call, cache_bytes, race, timer
from paged_bench._report import Record, Records, arguments, count, not_measured, parser, publish, ratio

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}  # above the rounding error
READ_SHARE, PEAK_SHARE = 0.92, 0.60  # target shares of the stream and of the matrix product
ONE_SHARE = 0.80  # target share of the stream for one long context
ENOUGH_BYTES = 256 << 20  # shorter calls do not reach the memory's speed, and have no target


@dataclass(frozen=True)
class Machine:
    """The measured limits of the device."""

    device: torch.device
    read: float  # bytes/s of a read-only stream
    flops: float  # operations/s in the query's type


@dataclass(frozen=True)
class Point:
    """The time of one contestant in one cell."""

    cell: Cell
    who: str
    seconds: float


def grid(device: torch.device, quick: bool) -> list[Cell]:
    """Return the cells to measure on a device."""
    if device.type == "cpu":
        return _small_grid(quick)
    half = torch.bfloat16
    base = Cell("decode", 64, 4096, 1, 32, 8, 128, half, half)
    prefill = Cell("prefill", 1, 8192, 8192, 32, 8, 128, half, half)
    if quick:
        return [base, replace(base, batch=1, context=32768), replace(prefill, context=2048, query=2048)]
    contexts = (512, 4096, 32768, 131072)
    cells = [replace(base, batch=b, context=c) for b in (1, 4, 16, 17, 64, 256) for c in contexts]
    for batch in (1, 16, 64):
        cells += [replace(base, batch=batch, heads=group * 8) for group in (1, 3, 8)]
        cells += [replace(base, batch=batch, head_dim=64), replace(base, batch=batch, heads=9, kv_heads=3, head_dim=64)]
        cells += [replace(base, batch=batch, pool=pool) for pool in (torch.float8_e4m3fn, torch.int8)]
    cells += [replace(base, batch=b, context=16384, mixed=True) for b in (16, 64, 256)]
    cells += [replace(base, batch=b, context=2048 + 256, shared=2048) for b in (4, 16, 64, 256)]
    cells += [replace(prefill, context=c, query=c) for c in (512, 2048, 8192, 32768)]
    cells += [replace(prefill, batch=8, context=1024, query=1024), replace(prefill, context=32768, query=512)]
    cells += [replace(prefill, head_dim=64), replace(prefill, pool=torch.float8_e4m3fn)]
    return cells


def _small_grid(quick: bool) -> list[Cell]:
    """Return cells with the heads of the demo model and of Llama."""
    full, half = torch.float32, torch.bfloat16
    base = Cell("decode", 16, 512, 1, 9, 3, 64, full, full)
    llama = Cell("decode", 8, 1024, 1, 32, 8, 128, half, half)
    prefill = Cell("prefill", 1, 512, 512, 9, 3, 64, full, full)
    if quick:
        return [replace(base, batch=4, context=256), replace(prefill, context=256, query=256)]
    cells = [replace(base, batch=b, context=c) for b, c in ((1, 4096), (16, 512), (16, 2048), (64, 512))]
    cells += [replace(base, mixed=True, context=2048), llama]
    bytewise = (torch.float8_e4m3fn, torch.int8)
    cells += [replace(base, pool=pool) for pool in bytewise]
    cells += [replace(base, dtype=half, pool=pool) for pool in (half, *bytewise)]
    cells += [replace(base, context=1024 + 64, shared=1024)]
    return [*cells, prefill, replace(prefill, context=2048, query=256)]


def measure_machine(device: torch.device, dtype: torch.dtype, quick: bool) -> Machine:
    """Measure the faster of two reductions over more memory than the caches hold, and a square matrix product."""
    nbytes = max(4 * cache_bytes(device), (1 << 30) if device.type == "cuda" else (128 << 20)) >> (2 if quick else 0)
    memory = torch.ones(nbytes // 4, device=device)
    size = (8192 if device.type == "cuda" else 1024) >> (1 if quick else 0)
    left, right = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    calls: dict[str, Call] = {
        "sum": lambda _: memory.sum(),
        "largest": lambda _: memory.amax(),
        "product": lambda _: left @ right,
    }
    taken = race({name: timer(call, 1, device) for name, call in calls.items()}, 5)
    best = {name: statistics.median(values) for name, values in taken.items()}
    return Machine(device, memory.nbytes / min(best["sum"], best["largest"]), 2 * size**3 / best["product"])


def attention(cell: Cell, on: Machine, rounds: int) -> tuple[list[Record], list[Point]]:
    """Measure every available contestant in one cell."""
    free = torch.cuda.mem_get_info(on.device)[0] if on.device.type == "cuda" else 1 << 30
    if 4 * cell.pool_bytes > free:  # room for the pool and for copies in the layouts of other contestants
        return [
            not_measured(cell.name, f"{4 * cell.pool_bytes / 2**30:.3g} GiB with all copies, {free / 2**30:.3g} free")
        ], []
    prepared = AttentionInputs(cell, on.device, free // 8)
    timers: dict[str, Callable[[], float]] = {}
    errors: dict[str, float] = {}
    records: list[Record] = []
    for who, make in contestants(cell, on.device).items():
        try:
            call = make(prepared)
            if who != UNQUANTIZED:  # UNQUANTIZED has keys and values of its own
                errors[who] = error(prepared, call(0))
            timers[who] = timer(call, prepared.count, on.device)
        except Unavailable as missing:
            records.append(not_measured(f"{cell.name}: {who}", str(missing)))
        except Exception as failed:  # the failure of another implementation must not stop the benchmark
            if who == OURS:
                raise
            reason = f"{type(failed).__name__}: {failed}".partition("\n")[0]
            records.append(not_measured(f"{cell.name}: {who}", reason))
    taken = race(timers, rounds)
    return _results(cell, on, taken, errors) + records, [
        Point(cell, who, statistics.median(v)) for who, v in taken.items()
    ]


def _results(cell: Cell, on: Machine, taken: dict[str, list[float]], errors: dict[str, float]) -> list[Record]:
    """Return the rate for the cell's kind, ratios of speed (above 1: ours is faster), and errors."""
    decode = cell.kind == "decode"
    work, unit = (cell.kv_bytes / 1e9, "GB/s") if decode else (cell.flops / 1e12, "TFLOP/s")
    limit = on.read / 1e9 if decode else on.flops / 1e12
    share: float | None = READ_SHARE if decode else PEAK_SHARE
    rates = {who: work / statistics.median(values) for who, values in taken.items()}
    if decode and cell.kv_bytes < ENOUGH_BYTES:
        share = ONE_SHARE if cell.batch == 1 and cell.context >= 32768 else None
    target = share and share * limit
    peers = {who: rate for who, rate in rates.items() if who != OURS}
    records = [Record(cell.name, rates[OURS], unit, target, limit, peers)]
    for who in peers:
        records.append(ratio(f"{cell.name}: speed over {who}", taken[who], taken[OURS], targets(cell).get(who)))
    others = {who: value for who, value in errors.items() if who != OURS}
    records.append(Record(f"{cell.name}: error", errors[OURS], "of fp32", limit=TOLERANCES[cell.dtype], peers=others))
    return records


def lines(on: Machine, dtype: torch.dtype, tokens: int, rounds: int) -> Iterator[Record]:
    """Measure the kernels that move memory."""
    for name, make in LINES.items():
        title = f"{name}, {tokens} tokens"
        try:
            call, count, nbytes = make(on.device, dtype, tokens)
            taken = race({name: timer(call, count, on.device)}, rounds)[name]
        except RuntimeError as error:  # out of memory, or a kernel that cannot be captured in a CUDA graph
            yield not_measured(title, str(error).partition("\n")[0])
            continue
        # Written bytes count like read ones, so a read-only stream may be faster.
        yield Record(title, nbytes / 1e9 / statistics.median(taken), "GB/s", limit=on.read / 1e9)


def main(argv: Sequence[str]) -> int:
    args = arguments(_parser(), argv, {"rounds": 3})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    every = grid(device, args.quick)
    cells = [cell for cell in every if args.only in cell.name]
    if not cells:
        _parser().error(f"argument --only: {args.only!r}: matches none of {', '.join(cell.name for cell in every)}")
    on = measure_machine(device, dtype, args.quick)
    records = Records(args)
    records.append(Record("read-only stream", on.read / 1e9, "GB/s"))
    records.append(Record("matrix product", on.flops / 1e12, "TFLOP/s"))
    points: list[Point] = []
    for index, cell in enumerate(cells):
        print(f"{index + 1} of {len(cells)}: {cell.name}", file=sys.stderr, flush=True)
        found, drawn = attention(cell, on, args.rounds)
        records += found
        points += drawn
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for tokens in (16,) if args.quick else (64, 512) if device.type == "cpu" else (64, 8192):
        records += lines(on, dtype, tokens, args.rounds)
    table(points)
    publish(records, lambda file, caption: draw(points, on, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("kernels", __doc__)
    made.add_argument("--rounds", type=count, default=9, metavar="N")
    made.add_argument("--only", default="", metavar="TEXT", help="only cells whose name contains this text")
    return made


def table(points: Sequence[Point]) -> None:
    """Print the microseconds of one call, with a row per cell."""
    present = dict.fromkeys(point.who for point in points)
    width = max((len(point.cell.name) for point in points), default=0)
    print(f"{'us':{width}}  " + "  ".join(f"{who:>16}" for who in present))
    for name in dict.fromkeys(point.cell.name for point in points):
        row = {point.who: f"{point.seconds * 1e6:.1f}" for point in points if point.cell.name == name}
        print(f"{name:{width}}  " + "  ".join(f"{row.get(who, '-'):>16}" for who in present))


def draw(points: Sequence[Point], on: Machine, file: Path, caption: str) -> None:
    """Draw a roofline, with each cell at its operations per byte (Williams et al. 2009)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    intensities = [point.cell.flops / point.cell.nbytes for point in points] or [1.0]
    line = [min(intensities) / 2, on.flops / on.read, max(*intensities, on.flops / on.read) * 2]
    axes.plot(line, [min(one * on.read, on.flops) / 1e12 for one in line], color="black", label="measured limit")
    for who in dict.fromkeys(point.who for point in points):
        mine = [point for point in points if point.who == who]
        x = [point.cell.flops / point.cell.nbytes for point in mine]
        y = [point.cell.flops / point.seconds / 1e12 for point in mine]
        colour = "#76b900" if who == OURS else None
        axes.plot(x, y, "o" if who == OURS else "x", color=colour, label=who, markersize=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.04, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
