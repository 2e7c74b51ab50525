"""Attention of a decode step and of a prompt on a CPU: the C++ operator at each level against gather + SDPA and against
SDPA over keys and values that lie one after the other. `python -m kernels.bench.cpu`; the demo model's shape by
default. Contestants take turns; medians, and the least; every layer has a pool of its own, so no cache holds it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import native
from kernels.cpu import paged_attention as in_pytorch
from kernels.layer_cache import FORMATS, LayerCache, quantize
from kernels.paging import Paging

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def pools(args: argparse.Namespace, num_blocks: int) -> list[LayerCache]:
    shape = (num_blocks, args.kv_heads, args.block_size, args.head_dim)
    made = []
    for _ in range(args.layers):
        parts = [torch.randn(shape, dtype=TYPES[args.dtype]) for _ in range(2)]
        quantized = next((dtype for dtype, name in FORMATS.items() if name == args.pool), None)
        if quantized:
            parts = [one for both in zip(*(quantize(part, quantized) for part in parts), strict=True) for one in both]
        made.append(LayerCache(*parts))
    return made


def addresses(args: argparse.Namespace) -> tuple[Paging, int]:
    """Block tables at random over the pool."""
    blocks = -(-args.context // args.block_size)
    tables = torch.randperm(args.batch * blocks, dtype=torch.int32).view(args.batch, blocks)
    starts = torch.arange(args.batch + 1, dtype=torch.int32) * args.query
    lens = torch.full((args.batch,), args.context, dtype=torch.int32)
    slots = torch.zeros(args.batch * args.query, dtype=torch.int64)
    return Paging(slots, tables, lens, starts, args.query, args.context), args.batch * blocks


def contestants(args: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    paging, num_blocks = addresses(args)
    layers = pools(args, num_blocks)
    query = torch.randn(args.batch * args.query, args.heads, args.head_dim, dtype=TYPES[args.dtype])
    scale = args.head_dim**-0.5

    def step(attend: Callable[..., Tensor]) -> Tensor:
        paging.derived.clear()
        for cache in layers:
            out = attend(query, cache, paging, scale=scale)
        return out

    made: dict[str, Callable[[], Tensor]] = {}
    for level in native.levels() if args.all_levels else native.levels()[:1]:
        if level != "amx_emulated":
            made[f"C++ {level}"] = partial(step, partial(native.paged_attention, level=level))
    made["gather + SDPA"] = partial(step, in_pytorch.paged_attention)
    if args.query in (1, args.context) and not args.pool:
        shape = (args.batch, args.kv_heads, args.context, args.head_dim)
        wide = query.view(args.batch, args.query, args.heads, args.head_dim).transpose(1, 2)
        kept = [[torch.randn(shape, dtype=query.dtype) for _ in range(2)] for _ in layers]

        def contiguous() -> Tensor:
            for keys, values in kept:
                out = F.scaled_dot_product_attention(
                    wide, keys, values, is_causal=args.query > 1, scale=scale, enable_gqa=True
                )
            return out

        made["contiguous SDPA"] = contiguous
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = dict(batch=16, context=512, query=1, layers=30, heads=9, kv_heads=3, head_dim=64, block_size=16, rounds=15)
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", choices=TYPES, default="bf16")
    parser.add_argument("--pool", choices=FORMATS.values(), help="one byte an element")
    parser.add_argument("--all-levels", action="store_true", help="not the best one only")
    args = parser.parse_args()

    memory = torch.ones(64 << 20)
    calls = {"read": memory.sum, **contestants(args)}
    taken: dict[str, list[float]] = {who: [] for who in calls}
    for turn in range(args.rounds + 1):
        for who, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                taken[who].append(time.perf_counter() - started)
    least = min(taken.pop("read"))
    element = 1 if args.pool else TYPES[args.dtype].itemsize
    nbytes = 2 * args.layers * args.batch * args.context * args.kv_heads * args.head_dim * element
    print(f"memory is read at {memory.nbytes / least / 1e9:.1f} GB/s; {torch.get_num_threads()} threads")
    print(
        f"keys and values: {nbytes / 1e6:.1f} MB a step, {nbytes / (memory.nbytes / least) * 1e3:.1f} ms at that rate"
    )
    for who, seconds in taken.items():
        ms = sorted(1e3 * one for one in seconds)
        print(f"{who:20} {statistics.median(ms):8.2f} ms a step, least {ms[0]:8.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
