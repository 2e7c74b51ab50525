"""Times launch shapes of all kernels on this GPU and writes the table that launches are looked up in.

    python -m paged_kernels.tune [--quick] [--table FILE] [--fresh]

A point of attention is decode rows or prefill chunks over randomly permuted blocks, in as many pools as the L2 cache
cannot hold; a point of another kernel is rows that the launch before has just written, as in a step. Both are replayed
as one CUDA graph. Candidates that do not compile, that spill, or whose result is not the reference's are skipped. What
was timed is kept in a journal beside the table, so that a run that was stopped goes on where it was. Exits with 2
without a GPU.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_kernels import launch
from paged_kernels.launch import (
    CONFIGS,
    ROW_BUCKETS,
    ROW_COUNT_INVARIANT,
    Launch,
    RowTile,
    RowTuningKey,
    Table,
    Tile,
    TuningKey,
    default_row_tile,
)
from paged_kernels.layer_cache import LayerCache, quantize
from paged_kernels.paging import Paging

NUM_KV_HEADS, BLOCK_SIZE = 8, 16
DECODING, PREFILLING = 64, 4  # sequences at the most
CACHED = 1024  # tokens before a chunk
LENGTHS = {"decode": (1024, 8192, 65536), "prefill": (64, 512, 4096)}
WIDTHS = {  # of rows, up to a power of two, in models of 0.5B to 70B; a model of 8B's first
    "kv_write": (1024, 256, 512),
    "rope_kv_write": (4096, 1024, 2048, 8192),
    "norm_rope_kv_write": (4096, 1024, 2048, 8192),
    "add_rms_norm": (4096, 1024, 2048, 8192),
    "swiglu": (16384, 4096, 8192, 32768),
    "sampling": (131072, 32768, 65536, 262144),
    "block_copy": (32768, 8192, 16384),
}
MIDDLE = 256  # rows that are timed where all numbers of rows have one piece; sequences that draw
TENSORS = 16  # that a block is copied in
TOLERANCE = 0.03  # of the largest magnitude: what rounding to bfloat16 stays below

Shape = Tile | RowTile
Measure = Callable[[Any, Any], float | None]  # of facts and shape: microseconds; None: does not run, spills, is wrong


def points(*, quick: bool) -> list[TuningKey | RowTuningKey]:
    """What a table has entries for: one of each kind first, those of models of 8B, and in these alone if quick."""
    first = [TuningKey(kind, 128, 2, 16, False, LENGTHS[kind][1]) for kind in LENGTHS]
    rows = [
        RowTuningKey(kind, width, count)
        for position in range(max(map(len, WIDTHS.values())))
        for kind, widths in WIDTHS.items()
        for width in widths[position : position + 1]
        for count in (ROW_BUCKETS[-1:] if kind in ROW_COUNT_INVARIANT else ROW_BUCKETS)
    ]
    if quick:
        return [
            *first,
            *(facts for facts in rows if facts.width == WIDTHS[facts.kind][0] and facts.rows == ROW_BUCKETS[-1]),
        ]
    every = [
        TuningKey(kind, block_d, 2, rows, quantized, length)
        for kind, block_d, rows, quantized in itertools.product(LENGTHS, (64, 128, 256), (16, 32, 64), (False, True))
        for length in LENGTHS[kind]
    ]
    return list(dict.fromkeys([*first, *rows, *every]))


def candidates(facts: TuningKey | RowTuningKey) -> Iterator[Shape]:
    """The default of any chip is among them. Whether one fits a chip is for its compiler to say."""
    if isinstance(facts, RowTuningKey):
        yield default_row_tile(facts)
        whole, unit = facts.kind == "add_rms_norm", 4 if facts.kind == "block_copy" else 1
        of_a_thread = (4, 8, 16, 32, 64, 128) if whole else (4, 8, 16, 32)
        for count, num_warps in itertools.product(of_a_thread, (1, 2, 4, 8, 16)):
            elements = 32 * num_warps * count * unit
            if elements == facts.width or (elements < facts.width and not whole):
                yield RowTile(elements, num_warps)
        return
    decode = facts.kind == "decode"
    block_ms = (facts.rows,) if decode else (64, 128)
    block_ns, warps = (32, 64, 128), (2, 4, 8) if decode else (4, 8)
    if facts.quantized and facts.block_d > 128:
        block_ns = (16, *block_ns)
    for block_m, block_n, num_warps, num_stages in itertools.product(block_ms, block_ns, warps, (1, 2, 3, 4)):
        if block_m * block_n * num_stages * facts.block_d <= 128 * 128 * 3 * 128:
            yield Tile(max(block_m, facts.rows), block_n, num_warps, num_stages)


def read_journal(file: Path) -> dict[tuple[Any, Any], float | None]:
    """Of a run that was stopped. A last line that was not written to its end is cut off. Raises ValueError for
    another that is damaged, naming file and line."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    timed = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            timed[launch.read_entry(entry)] = entry["us"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number}: not a timing ({error!r}); delete it to time that again"
            ) from error
    return timed


def tune(
    chip: str,
    wanted: Sequence[TuningKey | RowTuningKey],
    measure: Measure,
    *,
    file: Path,
    machine: str,
    show: Callable[[str], None] = print,
) -> Table:
    """Times what the journal does not hold, and writes the fastest of every point over the table's former entry. The
    table is written after each point, so that a run that is stopped leaves one of what it has come to."""
    journal = file.with_suffix(".journal")
    timed = read_journal(journal)
    rows = launch.read_table(file).rows() if file.exists() else []
    table = launch.make_table(chip, machine, rows)
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
                table = launch.make_table(chip, machine, rows)
                launch.write_table(table, file)
    journal.unlink()
    return table


@dataclass(frozen=True)
class Trial:
    """One point: what is launched for it, and what must come of it."""

    plans: list[Callable[[], list[Launch]]]  # one for each copy of the inputs, anew for every candidate
    outputs: list[Tensor]  # that the first plan writes
    expected: list[Tensor]
    checked: Any = ...  # what of each output is expected to be that

    def right(self) -> bool:
        """Floats up to rounding; codes, tokens and bytes exactly."""
        return all(map(_agree, (one[self.checked] for one in self.outputs), self.expected))


def _agree(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    error = (found.float() - expected.float()).abs().max()
    return bool(error <= TOLERANCE * expected.float().abs().max())


def trial(facts: TuningKey | RowTuningKey, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Trial:
    """Inputs of this point, at random, and what the reference makes of them."""
    return (
        _row_trial(facts, device, dtype) if isinstance(facts, RowTuningKey) else _attention_trial(facts, device, dtype)
    )


def _attention_trial(facts: TuningKey, device: torch.device, dtype: torch.dtype) -> Trial:
    """A step of this kind over random blocks, and pools of more bytes than twice the L2 cache. What is checked is one
    query of every sequence, in four heads of the first KV head."""
    from paged_kernels import paged_attention as attention

    decode = facts.kind == "decode"
    num_seqs = max(1, min(DECODING, 2**20 // facts.length)) if decode else PREFILLING
    query_len, context_len = (1, facts.length) if decode else (facts.length, CACHED + facts.length)
    group = 4 if facts.rows == 16 else facts.rows
    blocks = -(-context_len // BLOCK_SIZE)
    order = torch.randperm(num_seqs * blocks, device=device, dtype=torch.int32)
    shape = (len(order), NUM_KV_HEADS, BLOCK_SIZE, facts.block_d)
    pool_bytes = 2 * len(order) * NUM_KV_HEADS * BLOCK_SIZE * facts.block_d * (1 if facts.quantized else 2)
    held = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    caches = []
    for _ in range(1 + 2 * held // pool_bytes):
        keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        if facts.quantized:
            (keys, key_scales), (values, value_scales) = (quantize(x, torch.float8_e4m3fn) for x in (keys, values))
            caches.append(LayerCache(keys, values, key_scales, value_scales))
        else:
            caches.append(LayerCache(keys, values))

    def paging(context_lens: Tensor, query_len: int) -> Paging:
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        slots = torch.zeros(num_seqs * query_len, dtype=torch.int64, device=device)
        return Paging(slots, order.view(num_seqs, blocks), context_lens, starts, query_len, context_len)

    step = paging(torch.full((num_seqs,), context_len, dtype=torch.int32, device=device), query_len)
    query = torch.randn(num_seqs * query_len, NUM_KV_HEADS * group, facts.block_d, device=device, dtype=dtype)
    out = torch.empty_like(query)

    def plan(cache: LayerCache) -> list[Launch]:
        step.derived.clear()
        settings = dict(scale=0.1, sliding_window=None, softcap=None, sinks=None)
        return attention.plan_launch(out, query, cache, step, **settings, device=launch.device_of(device))

    picked = torch.randint(query_len, (num_seqs,), device=device)
    rows, heads = torch.arange(num_seqs, device=device) * query_len + picked, slice(0, group, max(1, group // 4))
    pairs = ((pool[:, :1], scales if scales is None else scales[:, :1]) for pool, scales in caches[0].pools)
    (keys, key_scales), (values, value_scales) = pairs
    expected = attention.paged_attention_reference(
        query[rows][:, heads], LayerCache(keys, values, key_scales, value_scales),
        paging((context_len - query_len + 1 + picked).int(), 1), scale=0.1,
    )  # fmt: skip
    plans = [lambda cache=cache: plan(cache) for cache in caches]
    return Trial(plans, [out], [expected], (rows, heads))


def _row_trial(facts: RowTuningKey, device: torch.device, dtype: torch.dtype) -> Trial:
    kind, width, on = facts.kind, facts.width, launch.device_of(device)
    rows = min(facts.rows, MIDDLE) if kind == "sampling" or kind in ROW_COUNT_INVARIANT else facts.rows

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def trial(expected: Sequence[Tensor], outputs: Sequence[Tensor], plan: Callable[[], list[Launch]]) -> Trial:
        return Trial([plan], list(outputs), [one.clone() for one in expected])

    if kind == "add_rms_norm":
        from paged_kernels import add_rms_norm as norm

        x, residual, weight, out = normal(rows, width), normal(rows, width), normal(width), normal(2, rows, width)
        expected = norm.add_rms_norm_reference(x, residual, weight, 1e-6)
        return trial(expected, out, lambda: [norm.plan_launch(*out, x, residual, weight, 1e-6, device=on)])
    if kind == "swiglu":
        from paged_kernels import swiglu

        gate_up, out = normal(rows, 2 * width), normal(rows, width)
        expected = [swiglu.swiglu_reference(gate_up)]
        return trial(expected, [out], lambda: [swiglu.plan_launch(out, gate_up, device=on)])
    if kind == "sampling":
        from paged_kernels import sampling
        from paged_kernels.cpu import sampling as on_cpu  # the reference takes a Python step for every token
        from paged_kernels.draws import SamplingMetadata

        logits, out = 3 * normal(rows, width), torch.empty(rows, dtype=torch.int64, device=device)
        seeds = torch.arange(rows)
        expected = [on_cpu.sample(logits.cpu(), SamplingMetadata(torch.ones(rows), seeds, seeds, None)).to(device)]
        draws = SamplingMetadata(torch.ones(rows, device=device), seeds.to(device), seeds.to(device), None)
        return trial(expected, [out], lambda: sampling.plan_launch(logits, draws, out, device=on))
    if kind == "block_copy":
        from paged_kernels import block_copy
        from paged_kernels.block_pair import BlockPair

        source, target = torch.randint(-128, 128, (2, TENSORS, rows, width), dtype=torch.int8, device=device)
        pair = BlockPair.of(source.unbind(), target.unbind())
        moves = torch.randperm(rows, device=device)[:, None].repeat(1, 2)
        block_copy.block_copy_reference(pair, moves)
        named = dict(largest=pair.largest, aligned=pair.aligned, device=on)
        return trial(target, target, lambda: [block_copy.plan_launch(moves, pair.table, **named)])
    from paged_kernels import kv_write, rope_kv_write

    head_dim = min(128, width)
    num_heads = width // head_dim
    num_kv_heads = num_heads if kind == "kv_write" else max(1, num_heads // 4)
    pool = torch.zeros(2, -(-rows // BLOCK_SIZE), num_kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=dtype)
    cache, slots = LayerCache(*pool), torch.randperm(pool.shape[1] * BLOCK_SIZE, device=device)[:rows]
    key, value = normal(2, rows, num_kv_heads, head_dim)
    if kind == "kv_write":
        kv_write.kv_write_reference(key, value, cache, slots)
        return trial(pool, pool, lambda: [kv_write.plan_launch(key, value, cache, slots, device=on)])
    query, angles = normal(rows, num_heads, head_dim), normal(rows, head_dim, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = dict(query_weight=normal(head_dim), key_weight=normal(head_dim)) if kind.startswith("norm") else {}
    turned = rope_kv_write.rope_kv_write_reference(query, key, value, cos, sin, cache, slots, **weights, eps=1e-6)
    out = torch.empty_like(query)
    given = (out, query, key, value, cos, sin, cache, slots, *(weights.values() or (None, None)), 1e-6)
    return trial([turned, *pool], [out, *pool], lambda: [rope_kv_write.plan_launch(*given, device=on)])


def measure_with(timer: Callable[[Callable[[], None]], float], device: torch.device, **options: Any) -> Measure:
    """Microseconds of one call, all its launches included, with the shape in place of the table's. timer: those of a
    function. options: of `trial`."""
    import triton

    last: list = []  # the inputs of one point serve all of its candidates

    def measure(facts: TuningKey | RowTuningKey, shape: Shape) -> float | None:
        if not last or last[0] != facts:
            last[:] = []
            last[:] = facts, trial(facts, device, **options)
        point: Trial = last[1]
        launch.use_table(launch.make_table(launch.device_of(device).chip, None, [(facts, shape)]))
        for one in point.outputs:
            one.zero_()
        try:
            if any(getattr(planned.run(), "n_spills", 0) for planned in point.plans[0]()) or not point.right():
                return None

            def run() -> None:
                for plan in point.plans:
                    for planned in plan():
                        planned.run()

            return timer(run) / len(point.plans)
        except (triton.CompilationError, triton.OutOfResources, RuntimeError):  # RuntimeError: a pass of the compiler
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises where a kernel has failed: then so would all others in this process
            return None

    return measure


def replayed(run: Callable[[], None]) -> float:
    """Microseconds on a GPU, from replays of a CUDA graph."""
    import triton

    taken: float = triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median")
    return taken * 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times launch shapes and writes this chip's table.")
    parser.add_argument("--quick", action="store_true", help="one point of each kernel only, two of attention")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="instead of the chip's own in kernels/paged_kernels/configs"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what a run that was stopped has timed")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU here; launch shapes are timed on the chip they are for", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    chip = launch.device_of(device).chip
    file = arguments.table or CONFIGS / f"{chip}.json"
    if arguments.fresh:
        file.with_suffix(".journal").unlink(missing_ok=True)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}"
    tune(chip, points(quick=arguments.quick), measure_with(replayed, device), file=file, machine=machine)
    print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
