"""Speed of every kernel relative to the limits of the machine, and of attention relative to other implementations.

Bytes and operations are the necessary ones: each key and value is read once, and nothing past the causal edge is
computed. The limits are measured in the same run: on a GPU by reductions and a matrix product, on a CPU by loops that
only read or multiply. Block tables are shuffled, inputs rotate to keep them out of the caches, contestants run
round-robin, and every output is compared with attention in fp32.
"""

from __future__ import annotations

import gc
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_bench._attention import OURS, UNQUANTIZED, AttentionInputs, Cell, Unavailable, contestants, error, targets
from paged_bench._harness import (
    Bars,
    Benchmark,
    Contest,
    InvalidArgument,
    Option,
    Record,
    alternate,
    first_line,
    not_measured,
    rounds_option,
)
from paged_bench._limits import MULTIPLY, READ, Machine, cpu_limits, gpu_limits
from paged_bench._timing import Call, rotations, timer
from paged_kernels import ops
from paged_kernels.layer_cache import BlockPair, LayerCache
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata

TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 3e-2}  # above the rounding error
READ_SHARE, PEAK_SHARE = 0.92, 0.60  # target shares of the limits
ONE_SHARE = 0.80  # target share of the bandwidth for one long context
ENOUGH_BYTES = 256 << 20  # shorter calls do not reach the memory's speed, and have no target
SHAPE = LayerShape(8, 128)
HEADS, HIDDEN, INNER, VOCAB = 32, 4096, 14336, 128256  # the sizes of Llama-3.1-8B, with SHAPE
BLOCK = 16


# --- attention --------------------------------------------------------------------------------------------------------


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


def attention(cell: Cell, on: Machine, rounds: int) -> tuple[list[Record], Mapping[str, float]]:
    """Measure every available contestant in one cell. Return the records, and the seconds of a call."""
    free = torch.cuda.mem_get_info(on.device)[0] if on.device.type == "cuda" else 1 << 30
    if 4 * cell.pool_bytes > free:  # room for the pool and for copies in the layouts of other contestants
        reason = f"{4 * cell.pool_bytes / 2**30:.3g} GiB with all copies, {free / 2**30:.3g} free"
        return [not_measured(cell.name, reason)], {}
    prepared = AttentionInputs(cell, on.device, free // 8)
    timers: dict[str, Callable[[], float]] = {}
    errors: dict[str, float] = {}
    absent: list[Record] = []
    for who, make in contestants(cell, on.device).items():
        try:
            call = make(prepared)
            if who != UNQUANTIZED:  # UNQUANTIZED has keys and values of its own
                errors[who] = error(prepared, call(0))
            timers[who] = timer(call, prepared.count, on.device)
        except Unavailable as missing:
            absent.append(not_measured(f"{cell.name}: {who}", str(missing)))
        except Exception as failed:  # the failure of another implementation must not stop the benchmark
            if who == OURS:
                raise
            absent.append(not_measured(f"{cell.name}: {who}", first_line(failed)))
    contest = alternate(timers, rounds, quiet=True)
    return [*_results(cell, on, contest, errors), *absent], contest.medians


def _results(cell: Cell, on: Machine, contest: Contest[float], errors: Mapping[str, float]) -> Iterator[Record]:
    """Yield the rate for the cell's kind, ratios of speed (above 1: ours is faster), and errors."""
    decode = cell.kind == "decode"
    work, unit = (cell.kv_bytes / 1e9, "GB/s") if decode else (cell.flops / 1e12, "TFLOP/s")
    limit = on.read / 1e9 if decode else on.flops[cell.dtype] / 1e12
    share: float | None = READ_SHARE if decode else PEAK_SHARE
    if decode and cell.kv_bytes < ENOUGH_BYTES:
        share = ONE_SHARE if cell.batch == 1 and cell.context >= 32768 else None
    rates = {who: work / seconds for who, seconds in contest.medians.items()}
    ours = rates.pop(OURS)
    yield Record(cell.name, ours, unit, share and share * limit, limit, rates)
    for who in rates:
        yield contest.ratio(f"{cell.name}: speed over {who}", who, OURS, targets(cell).get(who))
    others = {who: value for who, value in errors.items() if who != OURS}
    yield Record(f"{cell.name}: error", errors[OURS], "of fp32", limit=TOLERANCES[cell.dtype], peers=others)


def table(times: Mapping[str, Mapping[str, float]]) -> None:
    """Print the microseconds of one call, with a row per cell. times: seconds by cell and contestant."""
    present = dict.fromkeys(who for row in times.values() for who in row)
    width = max(map(len, times), default=0)
    print(f"{'us':{width}}  " + "  ".join(f"{who:>16}" for who in present))
    for name, row in times.items():
        shown = {who: f"{seconds * 1e6:.1f}" for who, seconds in row.items()}
        print(f"{name:{width}}  " + "  ".join(f"{shown.get(who, '-'):>16}" for who in present))


# --- kernels that move memory -----------------------------------------------------------------------------------------


# Creates the inputs of a kernel for a number of tokens. Returns a call, the number of copies of the inputs, and the
# bytes that a call has to read and write. To add a kernel, write such a function and add it to LINES.
Line = Callable[[torch.device, torch.dtype, int], tuple[Call, int, int]]


def kv_write(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 4 * tokens * SHAPE.num_kv_heads * SHAPE.head_dim * dtype.itemsize
    count = rotations(nbytes, device)
    cache, slots = _pool(count * tokens, device, dtype), _slots(count, tokens, device)
    key, value = _random(2, count, tokens, SHAPE.num_kv_heads, SHAPE.head_dim, device=device, dtype=dtype).unbind()
    return lambda i: ops.kv_write(key[i], value[i], cache, slots[i]), count, nbytes


def rope_kv_write(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    heads = HEADS + 2 * SHAPE.num_kv_heads
    nbytes = 2 * tokens * (heads + 1) * SHAPE.head_dim * dtype.itemsize  # +1: cosines and sines, which are only read
    count = rotations(nbytes, device)
    cache, slots = _pool(count * tokens, device, dtype), _slots(count, tokens, device)
    rows = _random(count, tokens, heads, SHAPE.head_dim, device=device, dtype=dtype)
    query, key, value = rows.split([HEADS, SHAPE.num_kv_heads, SHAPE.num_kv_heads], 2)
    angles = _random(tokens, SHAPE.head_dim // 2, device=device, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return lambda i: ops.rope_kv_write(query[i], key[i], value[i], cos, sin, cache, slots[i]), count, nbytes


def add_rms_norm(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 4 * tokens * HIDDEN * dtype.itemsize  # two read, two written
    count = rotations(nbytes, device)
    x, residual = _random(2, count, tokens, HIDDEN, device=device, dtype=dtype).unbind()
    weight = torch.ones(HIDDEN, device=device, dtype=dtype)
    return lambda i: ops.add_rms_norm(x[i], residual[i], weight, 1e-6), count, nbytes


def swiglu(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    nbytes = 3 * tokens * INNER * dtype.itemsize
    count = rotations(nbytes, device)
    gate_up = _random(count, tokens, 2 * INNER, device=device, dtype=dtype)
    return lambda i: ops.swiglu(gate_up[i]), count, nbytes


def greedy(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    return _sampling(device, tokens, None)


def filtered(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    """Sample every row with temperature, top_k and top_p."""
    rows = _rows(tokens)

    def full(value: float, kind: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=kind, device=device)

    filters = SamplingFilters(full(50, torch.int32), full(0.9, torch.float32), full(math.inf, torch.float32))
    whole = torch.arange(rows, device=device)
    return _sampling(device, tokens, SamplingMetadata(full(1.25, torch.float32), whole, whole, filters))


def _sampling(device: torch.device, tokens: int, draws: SamplingMetadata | None) -> tuple[Call, int, int]:
    nbytes = 4 * _rows(tokens) * VOCAB
    count = rotations(nbytes, device)
    logits = _random(count, _rows(tokens), VOCAB, device=device, dtype=torch.float32)
    return lambda i: ops.sample(logits[i], draws), count, nbytes


def _rows(tokens: int) -> int:
    return min(tokens, 256)


def block_copy(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Call, int, int]:
    """Copy blocks as copy-on-write does: whole blocks in all layers, here four."""
    copies = max(1, tokens // BLOCK)
    kv = KVCache.allocate(CacheLayout.of([SHAPE] * 4, BLOCK, dtype), 4 * copies, device)
    pair = BlockPair.of([kv.memory], [kv.memory])
    order = torch.randperm(4 * copies, generator=torch.Generator().manual_seed(0))
    moves = order[: 2 * copies].view(2, copies).T.contiguous().to(device)
    return lambda _: ops.block_copy(pair, moves), 1, 2 * copies * kv.page_bytes


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _pool(slots: int, device: torch.device, dtype: torch.dtype) -> LayerCache:
    blocks = -(-slots // BLOCK)
    kv = KVCache.allocate(CacheLayout.of([SHAPE], BLOCK, dtype), blocks, device)
    return kv.layers[0]


def _slots(count: int, tokens: int, device: torch.device) -> torch.Tensor:
    order = torch.randperm(count * tokens, generator=torch.Generator().manual_seed(0))
    return order.view(count, tokens).to(device)


LINES: dict[str, Line] = {
    "kv_write": kv_write,
    "rope_kv_write": rope_kv_write,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "sample, greedy": greedy,
    "sample, top_k 50 and top_p 0.9": filtered,
    "block_copy": block_copy,
}


def lines(on: Machine, dtype: torch.dtype, tokens: int, rounds: int) -> Iterator[Record]:
    """Measure the kernels that move memory."""
    for name, make in LINES.items():
        title = f"{name}, {tokens} tokens"
        try:
            call, count, nbytes = make(on.device, dtype, tokens)
            seconds = alternate({name: timer(call, count, on.device)}, rounds, quiet=True).medians[name]
        except RuntimeError as error:  # out of memory, or a kernel that cannot be captured in a CUDA graph
            yield not_measured(title, str(error).partition("\n")[0])
            continue
        # Written bytes count like read ones, so only reading may be faster.
        yield Record(title, nbytes / 1e9 / seconds, "GB/s", limit=on.read / 1e9)


# --- the benchmark ----------------------------------------------------------------------------------------------------


def measure(args: Namespace) -> Iterator[Record]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    every = grid(device, args.quick)
    cells = [cell for cell in every if args.only in cell.name]
    if not cells:
        names = ", ".join(cell.name for cell in every)
        raise InvalidArgument(f"argument --only: {args.only!r}: matches none of {names}")
    on, limits = cpu_limits(torch.get_num_threads()) if device.type == "cpu" else gpu_limits(device, dtype, args.quick)
    yield from limits
    if on is None:
        return
    times: dict[str, Mapping[str, float]] = {}
    for index, cell in enumerate(cells):
        print(f"{index + 1} of {len(cells)}: {cell.name}", file=sys.stderr, flush=True)
        records, times[cell.name] = attention(cell, on, args.rounds)
        yield from records
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for tokens in (16,) if args.quick else (64, 512) if device.type == "cpu" else (64, 8192):
        yield from lines(on, dtype, tokens, args.rounds)
    table({name: row for name, row in times.items() if row})


def panels(records: Sequence[Record]) -> Iterator[Bars]:
    """Yield the share of the machine's limit that each kernel reaches."""
    for unit, title in (("GB/s", READ), ("TFLOP/s", MULTIPLY)):
        shares = {
            record.name: 100 * (record.value or 0.0) / record.limit
            for record in records
            if record.unit == unit and record.limit and record.value is not None
        }
        if shares:
            yield Bars(f"share of the {title}, %", shares, line=100.0)


main = Benchmark(
    __doc__,
    measure,
    panels,
    options=(rounds_option(9), Option("--only", "only cells whose name contains this text", "", metavar="TEXT")),
    quick={"rounds": 3},
)
