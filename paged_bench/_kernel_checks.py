"""Check every kernel once against its reference, on the GPU if there is one.

    python -m paged_bench._kernel_checks [--processes N] [--json FILE]

Most of the time passes in compiling, so several processes are faster. It needs no pytest, and is no replacement for
tests/kernels, which has more shapes, types and corner cases.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_bench._attention import AttentionInputs, Cell, error
from paged_bench._harness import Record, Records, count, first_line, not_measured
from paged_kernels import ops
from paged_kernels.block_copy import block_copy_reference
from paged_kernels.cpu import native
from paged_kernels.cpu.sampling import sample as sample_on_cpu
from paged_kernels.kv_write import kv_write_reference, latent_kv_write_reference, rope_kv_write_reference
from paged_kernels.layer_cache import FORMATS, BlockPair, LayerCache
from paged_kernels.layer_ops import (
    add_rms_norm_reference,
    few_rows_linear_reference,
    invariant_linear_reference,
    swiglu_reference,
)
from paged_kernels.paging import Paging
from paged_kernels.sampling import sample_reference
from paged_kernels.sampling_metadata import SamplingFilters, SamplingMetadata
from paged_kernels.step_inputs import embed_reference, step_inputs_reference

TOKENS, HEADS, SHAPE, BLOCK = 24, 16, LayerShape(8, 128), 16  # the attention heads of Qwen3-0.6B
ROUNDING = 2e-2  # largest difference of bfloat16 results near 1
Check = Callable[[torch.device], tuple[float, float]]  # returns the largest error, and its limit


def attention(cell: Cell) -> Check:
    def check(device: torch.device) -> tuple[float, float]:
        prepared = AttentionInputs(cell, device, 0)
        out = ops.paged_attention(prepared.query, prepared.cache, prepared.sharing(0), scale=prepared.scale)
        return error(prepared, out), ROUNDING

    return check


def kv_write(dtype: torch.dtype) -> Check:
    def check(device: torch.device) -> tuple[float, float]:
        key, value, slots = _rows(device), _rows(device), _slots(device)
        found, expected = _cache(dtype, device), _cache(dtype, device)
        ops.kv_write(key, value, found, slots)
        kv_write_reference(key, value, expected, slots)
        return _different_bits(found, expected), 0.0

    return check


def _angles(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(TOKENS) + 3.0, 2.0 ** -torch.arange(size // 2).clamp(max=20)).repeat(1, 2)
    return angles.cos().to(device, torch.bfloat16), angles.sin().to(device, torch.bfloat16)


def rope_kv_write(device: torch.device) -> tuple[float, float]:
    query, key, value, slots = _rows(device, HEADS), _rows(device), _rows(device), _slots(device)
    cos, sin = _angles(SHAPE.head_dim, device)
    found, expected = _cache(torch.bfloat16, device), _cache(torch.bfloat16, device)
    rotated = ops.rope_kv_write(query, key, value, cos, sin, found, slots)
    wanted = rope_kv_write_reference(query, key, value, cos, sin, expected, slots)
    return max(_difference(rotated, wanted), _difference(found.keys, expected.keys)), ROUNDING


def latent_kv_write(device: torch.device) -> tuple[float, float]:
    query, latents, slots = _rows(device, HEADS), _random(TOKENS, 96 + 32, device=device), _slots(device)
    weight, (cos, sin) = 1 + _random(96, device=device) / 4, _angles(32, device)
    pools = [torch.zeros_like(_cache(torch.bfloat16, device).keys[:, :1]) for _ in range(2)]
    found, expected = (LayerCache.latent(pool, 96) for pool in pools)
    arguments = query, latents, weight, 1e-6, cos, sin
    rotated = ops.latent_kv_write(*arguments, found, slots, from_pairs=True, to_pairs=False)
    wanted = latent_kv_write_reference(*arguments, expected, slots, from_pairs=True, to_pairs=False)
    return max(_difference(rotated, wanted), _difference(found.keys, expected.keys)), ROUNDING


def add_rms_norm(device: torch.device) -> tuple[float, float]:
    x, residual = _random(2, TOKENS, 1024, device=device).unbind()
    weight = 1 + _random(1024, device=device) / 4
    pairs = zip(
        ops.add_rms_norm(x, residual, weight, 1e-6),
        add_rms_norm_reference(x, residual, weight, 1e-6),
        strict=True,
    )
    return max(_difference(*pair) for pair in pairs), ROUNDING


def swiglu(device: torch.device) -> tuple[float, float]:
    gate_up = _random(TOKENS, 2 * 3072, device=device)
    return _difference(ops.swiglu(gate_up), swiglu_reference(gate_up)), ROUNDING


def few_rows_linear(swiglu: bool) -> Check:
    def check(device: torch.device) -> tuple[float, float]:
        x, residual = _random(2, 16, 1024, device=device).unbind()
        norm, weight = 1 + _random(1024, device=device) / 4, _random(2048, 1024, device=device) / 32
        options: dict[str, Any] = {"residual": residual, "norm": norm, "eps": 1e-6, "swiglu": swiglu}
        found = ops.few_rows_linear(x, weight, **options)
        expected = few_rows_linear_reference(x, weight, **options)
        largest = max(_difference(*pair) for pair in zip(found, expected, strict=True))
        return largest, (2 if swiglu else 1) * ROUNDING  # SwiGLU multiplies two rounded values

    return check


def invariant_linear(device: torch.device) -> tuple[float, float]:
    x, weight = _random(200, 1024, device=device), _random(2048, 1024, device=device) / 32
    return _difference(ops.invariant_linear(x, weight), invariant_linear_reference(x, weight)), ROUNDING


def invariant_rows(device: torch.device) -> tuple[float, float]:
    """Count the elements that differ between steps of other numbers of rows."""
    x, weight = _random(200, 1024, device=device), _random(2048, 1024, device=device) / 32
    whole = ops.invariant_linear(x, weight)
    parts = ((whole[-count:], ops.invariant_linear(x[-count:], weight)) for count in (1, 16, 63, 64, 65, 128))
    return float(sum(int((found != expected).sum()) for expected, found in parts)), 0.0


def invariant_attention(dtype: torch.dtype) -> Check:
    """Count the elements that differ between one long chunk, short chunks and decode rows, in one step and alone."""

    def check(device: torch.device) -> tuple[float, float]:
        if device.type == "cpu":
            native.avoid_tiles()  # as an engine with batch_invariant does
        length, first, spans = 3000, 2000, ((2999, 1), (2000, 300), (2500, 1), (2047, 2), (2700, 64))
        blocks = -(-length // BLOCK)
        layout = CacheLayout.of([replace(SHAPE, batch_invariant=True)], BLOCK, dtype)
        (cache,) = KVCache.allocate(layout, blocks, device).layers
        table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(device)
        positions = torch.arange(length, device=device)
        slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
        key, value = _random(2, length, SHAPE.num_kv_heads, SHAPE.head_dim, device=device).unbind()
        ops.kv_write(key, value, cache, slots)
        query = _random(length, HEADS, SHAPE.head_dim, device=device)

        def attend(*chunks: tuple[int, int]) -> Tensor:
            rows = torch.cat([query[start : start + count] for start, count in chunks])
            paging = Paging(
                slots=slots[: len(rows)],
                block_tables=table.int().expand(len(chunks), -1).contiguous(),
                context_lens=torch.tensor([start + count for start, count in chunks], device=device).int(),
                query_starts=torch.tensor([0, *accumulate(count for _, count in chunks)], device=device).int(),
                max_query_len=max(count for _, count in chunks),
                max_context_len=length,
            )
            return ops.paged_attention(rows, cache, paging, scale=SHAPE.head_dim**-0.5)

        whole = attend((first, length - first))
        expected = torch.cat([whole[start - first : start - first + count] for start, count in spans])
        alone = torch.cat([attend(span) for span in spans])
        return float((attend(*spans) != expected).sum() + (alone != expected).sum()), 0.0

    return check


def step_inputs(device: torch.device) -> tuple[float, float]:
    tokens = torch.tensor([[5, -1, -3, 7]], device=device)
    previous = torch.tensor([11, 12, -1], device=device)
    packed, lens = torch.arange(16, device=device).int(), torch.tensor([40, 1, 64, 17], device=device).int()
    width = torch.tensor([4], device=device).int()
    found, expected = (torch.full((4, 6), -7, dtype=torch.int32, device=device) for _ in range(2))
    made = ops.step_inputs(tokens, previous, found, packed, width, lens, block_size=BLOCK)
    wanted = step_inputs_reference(tokens, previous, expected, packed, width, lens, block_size=BLOCK)
    return float((made != wanted).sum() + (found != expected).sum()), 0.0


def embed(device: torch.device) -> tuple[float, float]:
    ids, positions = torch.randint(90, (2, TOKENS), generator=torch.Generator().manual_seed(0)).to(device).unbind()
    weight, table = _random(90, 3072, device=device), _random(90, 256, device=device)
    pairs = zip(ops.embed(ids, positions, weight, table), embed_reference(ids, positions, weight, table), strict=True)
    return float(sum(int((found != expected).sum()) for found, expected in pairs)), 0.0


def sample(filtered: bool) -> Check:
    def check(device: torch.device) -> tuple[float, float]:
        rows = 4
        logits = 3 * torch.randn(rows, 500, generator=torch.Generator().manual_seed(0))
        kept = SamplingFilters(torch.full((rows,), 20, dtype=torch.int32), torch.full((rows,), 0.9), torch.ones(rows))
        draws = SamplingMetadata(torch.ones(rows), torch.arange(rows), torch.arange(rows), kept) if filtered else None
        found = ops.sample(logits.to(device), draws and _draws_on(device, draws)).cpu()
        return float((found != sample_reference(logits, draws)).sum()), 0.0

    return check


def sample_vocabulary(rows: int) -> Check:
    """Compare rows over a vocabulary of 151,936 tokens, steep and flat, with the sampling on a CPU.

    The filters of the rows are in turn top_k, top_p, min_p, all, and none.
    """

    def check(device: torch.device) -> tuple[float, float]:
        index = torch.arange(rows)
        scale = 3 + index[:, None] // 5 % 3
        logits = (scale * torch.randn(rows, 151_936, generator=torch.Generator().manual_seed(0))).bfloat16()
        kept = SamplingFilters(
            torch.tensor([50, 2**31 - 1, 2**31 - 1, 50, 2**31 - 1]).int()[index % 5],
            torch.tensor([1.0, 0.9, 1.0, 0.9, 1.0])[index % 5],
            torch.tensor([torch.inf, torch.inf, 3.0, 3.0, torch.inf])[index % 5],
        )
        draws = SamplingMetadata(torch.ones(rows), index, index, kept)
        found = ops.sample(logits.to(device), _draws_on(device, draws)).cpu()
        return float((found != sample_on_cpu(logits, draws)).sum()), 0.0

    return check


def _draws_on(device: torch.device, draws: SamplingMetadata) -> SamplingMetadata:
    assert draws.filters is not None
    filters = SamplingFilters(*(tensor.to(device) for tensor in vars(draws.filters).values()))
    return SamplingMetadata(draws.scales.to(device), draws.seeds.to(device), draws.positions.to(device), filters)


def block_copy(device: torch.device) -> tuple[float, float]:
    found, expected = (
        KVCache.allocate(CacheLayout.of([SHAPE] * 2, BLOCK, torch.bfloat16), 8, device).memory for _ in range(2)
    )
    found.copy_(torch.randint(256, found.shape))
    expected.copy_(found)
    moves = torch.tensor([[3, 0], [1, 5], [4, 2]], device=device)
    ops.block_copy(BlockPair.of([found], [found]), moves)
    block_copy_reference(BlockPair.of([expected], [expected]), moves)
    return float((found != expected).sum()), 0.0


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, torch.bfloat16)


def _rows(device: torch.device, heads: int = SHAPE.num_kv_heads) -> Tensor:
    return _random(TOKENS, heads, SHAPE.head_dim, device=device)


def _slots(device: torch.device) -> Tensor:
    order = torch.randperm(4 * BLOCK, generator=torch.Generator().manual_seed(0))
    return order[:TOKENS].index_fill(0, torch.tensor([2, 8]), -1).to(device)  # two tokens of padding


def _cache(dtype: torch.dtype, device: torch.device) -> LayerCache:
    return KVCache.allocate(CacheLayout.of([SHAPE], BLOCK, dtype), 4, device).layers[0]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative where the expected value is more than 1; infinity for NaN."""
    scaled = (found.float() - expected.float()).abs() / expected.float().abs().clamp(min=1)
    return float(scaled.nan_to_num(nan=float("inf")).max())


def _different_bits(found: LayerCache, expected: LayerCache) -> float:
    pairs = zip(found.tensors, expected.tensors, strict=True)
    return float(sum(int((tensor != other).sum()) for tensor, other in pairs))


_DECODE = Cell("decode", 4, 300, 1, HEADS, SHAPE.num_kv_heads, SHAPE.head_dim, torch.bfloat16, torch.bfloat16)
CELLS = (
    _DECODE,
    replace(_DECODE, batch=1, context=3000),
    *(replace(_DECODE, pool=dtype) for dtype in FORMATS),
    replace(_DECODE, batch=8, context=2400, shared=2048),
    replace(_DECODE, kind="prefill", batch=2, context=200, query=150),
    replace(_DECODE, kind="prefill", batch=3, context=1500, query=1400),  # fills large tiles
    replace(_DECODE, kind="prefill", batch=1, context=9000, query=64),  # whose keys are split
)
CHECKS: dict[str, Check] = {
    **{f"paged_attention, {cell.name}": attention(cell) for cell in CELLS},
    **{f"kv_write, {name}": kv_write(dtype) for dtype, name in {torch.bfloat16: "bf16", **FORMATS}.items()},
    "rope_kv_write": rope_kv_write,
    "latent_kv_write": latent_kv_write,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "few_rows_linear": few_rows_linear(swiglu=False),
    "few_rows_linear, SwiGLU": few_rows_linear(swiglu=True),
    "invariant_linear": invariant_linear,
    "invariant_linear, rows alone": invariant_rows,
    "paged_attention, batch-invariant": invariant_attention(torch.bfloat16),
    **{f"paged_attention, batch-invariant, {name}": invariant_attention(dtype) for dtype, name in FORMATS.items()},
    "step_inputs": step_inputs,
    "embed": embed,
    "sample, greedy": sample(filtered=False),
    "sample, filtered": sample(filtered=True),
    **{f"sample, vocabulary of 151,936, rows: {rows}": sample_vocabulary(rows) for rows in (1, 64)},
    "block_copy": block_copy,
}


def run(name: str) -> tuple[bool, Record]:
    """Return whether a check passed, and its record. An error does not stop the others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        largest, allowed = CHECKS[name](device)
    except Exception as failed:
        return False, not_measured(f"check: {name}", first_line(failed))
    return largest <= allowed, Record(f"check: {name}", min(largest, 1e9), "largest error", limit=allowed)


def results(processes: int) -> Iterator[tuple[bool, Record]]:
    """Yield the results of all checks."""
    if processes == 1:
        yield from map(run, CHECKS)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(run, CHECKS)


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m paged_bench._kernel_checks", description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=count, default=1, metavar="N", help="number of processes (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to FILE")
    args = parser.parse_args(argv)
    records, failed = Records(parser.prog, args.json), 0
    for passed, record in results(args.processes):
        shown = record.unit if record.value is None else f"{record.value:.3g}, at most {record.limit:.3g}"
        print(f"{'passed' if passed else 'FAILED'} {record.name.removeprefix('check: ')}: {shown}", flush=True)
        records.append(record)
        failed += not passed
    records.save(complete=True)
    print(f"{len(records) - failed} of {len(records)} kernel checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
