"""Measure what paging does for memory: wasted slots, capacity, sharing, windows, latents and states, bookkeeping.

All parts but the last run the scheduler and block manager without a model, because block allocation depends only on
lengths. Lengths are log-normal, with the means that the paper reports for ShareGPT (161 in, 338 out) and Alpaca (19
in, 58 out), and at most 1,024 (Kwon et al. 2023, section 6.1; arXiv:2309.06180).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import TYPE_CHECKING

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.step_result import StepResult
from paged_bench._cache_simulation import MODELS, cache_memory
from paged_bench._pool_simulation import POOL_SLOTS, RESERVATION, requests, simulate, utilisation
from paged_bench._report import Record, Records, arguments, count, parser, publish
from paged_bench._workload import DATASETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIN_REQUESTS = 100
WIDTHS = (2, 4, 6)  # samples or beams of one prompt
WASTE_TARGETS = {("ShareGPT", 16): 2.5, ("Alpaca", 4): 3.5}
WASTE_LIMITS = {("ShareGPT", 16): 2.2, ("Alpaca", 4): 3.0}


def pages(count: int) -> tuple[list[Record], dict[str, dict[int, float]]]:
    records: list[Record] = []
    curves: dict[str, dict[int, float]] = {}
    for dataset in DATASETS:
        work, curves[dataset] = requests(dataset, count), {}
        for size in BLOCK_SIZES:
            samples = list(simulate(work, size))
            waste = 100 * (1 - utilisation(samples, "allocated"))
            curves[dataset][size] = waste
            peers = {
                f"contiguous, {of}": 100 * (1 - utilisation(samples, of))
                for of in ("maximum", "power_of_two", "oracle")
            }
            place = (dataset, size)
            records.append(
                Record(
                    f"waste {dataset} block_size={size}",
                    waste,
                    "%",
                    WASTE_TARGETS.get(place),
                    WASTE_LIMITS.get(place),
                    peers,
                )
            )
    return records, curves


def capacity(count: int) -> list[Record]:
    """Measure how many requests run at once, relative to a contiguous cache with RESERVATION slots for each.

    The limit is the figure without any wasted slot. It is below what the mean lengths suggest, because long requests
    stay longer.
    """
    records = []
    for name, equal in (("lengths that vary", False), ("all of mean length", True)):
        samples = list(simulate(requests("ShareGPT", count, equal=equal), 16))
        resident = statistics.mean(one.requests for one in samples) / (POOL_SLOTS // RESERVATION)
        limit = RESERVATION / (sum(one.live for one in samples) / sum(one.requests for one in samples))
        records.append(Record(f"capacity ShareGPT, {name}", resident, "x", 6.0, limit))
    return records


def sharing(count: int, widths: Rows[int]) -> list[Record]:
    """Measure the share of blocks that parallel sampling and beam search save by sharing, beside the computed share."""
    records = []
    for dataset, kind, width in itertools.product(DATASETS, ("n", "beam_width"), widths):
        samples = list(simulate(requests(dataset, count, {kind: width}), 16))
        unshared = sum(one.unshared for one in samples)
        saved = 100 * (1 - sum(one.allocated for one in samples) / unshared)
        analytic = 100 * (1 - sum(one.analytic for one in samples) / unshared)
        records.append(
            Record(f"saved by sharing {dataset} {kind}={width}", saved, "%", peers={"by arithmetic": analytic})
        )
    return records


def bookkeeping(steps: int) -> list[Record]:
    """Measure the time of schedule and commit for each decoding sequence, in microseconds."""
    records = []
    for running in (256, 1024):
        for context in (64, 1024):
            blocks = BlockManager(running * (context // 16 + 32), 16, caching=True)
            scheduler = Scheduler(blocks, max_num_seqs=running, max_num_batched_tokens=running * context)
            for key in range(running):
                prompt = tuple((key * 7919 + position) % 50_000 for position in range(context))
                scheduler.add(GenerateRequest(key, prompt, SamplingParams(max_tokens=500), 0, frozenset({2})))
            times = []
            for _ in range(steps + 1):
                started = time.perf_counter()
                plan = scheduler.schedule()
                assert plan is not None
                scheduler.commit(plan, StepResult.of_tokens([0] * running))
                times.append((time.perf_counter() - started) / running * 1e6)
            name = f"bookkeeping running={running} context={context}"
            records.append(Record(name, statistics.median(times[1:]), "us/sequence/step", target=3.0))
    return records


def attention_speed(rounds: int) -> list[Record]:
    """Measure attention and KV write of one layer by block size, in ms, for 16 decoding sequences with context 512.

    The layer has 9 heads of 64 and 3 KV heads, as in the demo model. The block sizes run alternately.
    """
    import torch

    from paged_kernels.layer_cache import LayerCache
    from paged_kernels.ops import kv_write, paged_attention
    from paged_kernels.paging import Paging

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count, context = 16, 512
    lens = torch.full((count,), context, dtype=torch.int32, device=device)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    query, new = (torch.randn(count, heads, 64, device=device) for heads in (9, 3))

    def step(size: int, cache: LayerCache, tables: torch.Tensor) -> None:
        slots = tables[:, (context - 1) // size].long() * size + (context - 1) % size
        paging = Paging(slots, tables, lens, starts, 1, context)
        kv_write(new, new, cache, slots)
        paged_attention(query, cache, paging, scale=0.125)
        if device.type == "cuda":
            torch.cuda.synchronize()

    pools, times = {}, {size: list[float]() for size in BLOCK_SIZES}
    for size in BLOCK_SIZES:
        blocks = -(-context // size)
        cache = torch.randn(count * blocks, 3, size, 64, device=device)
        tables = torch.randperm(count * blocks).to(torch.int32).view(count, blocks).to(device)
        pools[size] = (LayerCache(cache, cache), tables)
        step(size, *pools[size])
    for _ in range(rounds):
        for size, (cache, tables) in pools.items():
            started = time.perf_counter()
            step(size, cache, tables)
            times[size].append(time.perf_counter() - started)
    return [
        Record(f"attention on {device.type}, block_size={size}", 1e3 * statistics.median(values), "ms/layer")
        for size, values in times.items()
    ]


def system_prompt(model: str, count: int) -> list[Record]:
    """Measure the time to first token of requests with a shared system prompt, with the prefix cache on and off.

    The system prompt has 512 tokens, or half of the model's maximum length. Requests run one after the other.
    """
    from paged_backend.api.config import EngineConfig
    from paged_backend.engine.assembly import assemble
    from paged_bench._engine import serve
    from paged_client.serving.repository import resolve_model

    rng = random.Random(0)
    options = {"model": resolve_model(model), "dtype": "float32", "num_gpu_blocks_override": 512}
    first: dict[bool, list[float]] = {True: [], False: []}
    hit_rate = 0.0
    for caching in (True, False):
        assembly = assemble(EngineConfig.from_options(options | {"enable_prefix_caching": caching}))
        vocab = assembly.limits.vocab_size
        shared = min(512, assembly.limits.max_model_len // 2)
        draw = random.Random(1).randrange
        system = [draw(vocab) for _ in range(shared)]
        total = 0
        for key in range(count):
            prompt = system + [rng.randrange(vocab) for _ in range(24)]
            total += len(prompt)
            started = time.perf_counter()
            sampling = SamplingParams(max_tokens=1, temperature=0)
            request = GenerateRequest.from_prompt(key, prompt, sampling, 0, frozenset(), assembly.limits)
            for _ in serve(assembly, [request]):
                pass
            first[caching].append(time.perf_counter() - started)
        if caching:
            hit_rate = 100 * assembly.scheduler.stats.cached_tokens / total
    medians = {caching: statistics.median(values) for caching, values in first.items()}
    return [
        Record(f"hit rate, system prompt of {shared} tokens", hit_rate, "%", limit=100 * shared / (shared + 24)),
        Record("time to first token, cached", medians[True] * 1e3, "ms", peers={"cache off": medians[False] * 1e3}),
    ]


def main(argv: Rows[str]) -> int:
    args = arguments(_parser(), argv, {"requests": MIN_REQUESTS})
    count, widths = args.requests, WIDTHS[:2] if args.quick else WIDTHS
    measured, curves = pages(count)
    records = Records(args, measured)
    records += capacity(count)
    records += sharing(count, widths)
    records += cache_memory()
    records += bookkeeping(min(count, 200))
    records += attention_speed(10 if args.quick else 50)
    records += system_prompt(args.model, 2 if args.quick else count // 10)
    publish(records, lambda file, caption: draw(records, curves, widths, file, caption))
    return 0


def _num_requests(text: str) -> int:
    """Parse --requests. The pool is sampled while requests wait for blocks, so that there must be enough of them."""
    if (value := count(text)) < MIN_REQUESTS:
        raise ArgumentTypeError(f"{text!r}: must be at least {MIN_REQUESTS}, so that some wait for blocks")
    return value


def _parser() -> ArgumentParser:
    made = parser("memory", __doc__)
    made.add_argument(
        "--requests",
        type=_num_requests,
        default=2000,
        metavar="N",
        help="requests to simulate (default: 2000); a tenth of them for the model",
    )
    made.add_argument("--model", default="demo", help="model of the last part (default: demo)")
    return made


def draw(
    records: Rows[Record], curves: dict[str, dict[int, float]], widths: Rows[int], file: Path, caption: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.4), layout="constrained")
    left, middle, right, held = figure.subplots(1, 4)
    for dataset, curve in curves.items():
        left.plot(list(curve), list(curve.values()), marker="o", label=dataset)
    left.set_xscale("log", base=2)
    left.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    left.set_xlabel("tokens per block")
    left.set_ylabel("slots that hold no token, %")
    left.legend(frameon=False)
    by_name = {record.name: record for record in records}
    bars = {"blocks of 16": by_name["waste ShareGPT block_size=16"].value} | dict(
        by_name["waste ShareGPT block_size=16"].peers
    )
    drawn = middle.bar(
        [name.replace("contiguous, ", "").replace("_", " ") for name in bars],
        list(bars.values()),
        color=["#76b900", *["#b0b0b0"] * 3],
    )
    middle.bar_label(drawn, fmt="%.1f")
    middle.set_title("waste on ShareGPT lengths, %", fontsize=10)
    for dataset, (kind, style) in itertools.product(DATASETS, (("n", "-"), ("beam_width", "--"))):
        shared = [by_name[f"saved by sharing {dataset} {kind}={width}"].value for width in widths]
        label = f"{dataset}, {'samples' if kind == 'n' else 'beams'}"
        right.plot(widths, shared, style, marker="o", label=label, color="C0" if dataset == "ShareGPT" else "C1")
    right.set_xlabel("samples or beams of one prompt")
    right.set_ylabel("blocks saved by sharing, %")
    right.set_xticks(widths)
    right.set_ylim(0)
    right.legend(frameon=False)
    draw_held(held, by_name)
    for axes in (left, middle, right, held):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, -0.05, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")


def draw_held(axes: Axes, records: Mapping[str, Record]) -> None:
    """Draw the share of memory that a sequence of 8,192 tokens holds, of keys and values in all layers."""
    shares = {}
    for model in MODELS:
        record = records[f"memory, {model.name}, 8,192 tokens"]
        assert record.value is not None
        shares[model.name] = 100 * record.value / record.peers["all kept"]
    drawn = axes.barh(list(shares), list(shares.values()), color="#76b900")
    axes.bar_label(drawn, fmt="%.1f")
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_title("memory at 8,192 tokens, % of all keys and values", fontsize=10)
