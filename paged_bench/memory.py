"""What pages do for memory: how full they are, how many requests fit, what sharing saves, what the bookkeeping costs.

All but the last part runs the real scheduler and block manager with a model that draws token 0 in no time: which
block belongs to whom depends on lengths alone. Lengths are log-normal with the means that the paper reports for
ShareGPT (161 in, 338 out) and Alpaca (19 in, 58 out), cut at 1,024 (Kwon et al. 2023, section 6.1; arXiv:2309.06180).
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.scheduling.beam_search import Candidate
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.sequence import Sequence
from paged_backend.scheduling.step_result import StepResult
from paged_bench._report import Record, arguments, count, parser, publish
from paged_bench._workload import DATASETS, lengths

RESERVATION = 2048  # slots that a contiguous cache reserves for each request, whatever comes
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_SLOTS = 16_384
LEAST_REQUESTS = 100
WIDTHS = (2, 4, 6)  # samples or beams of one prompt
WASTE_TARGETS = {("ShareGPT", 16): 2.5, ("Alpaca", 4): 3.5}
WASTE_LIMITS = {("ShareGPT", 16): 2.2, ("Alpaca", 4): 3.0}


@dataclass(frozen=True)
class Sample:
    """The pool at one moment, and what others would have reserved for the same requests."""

    requests: int
    live: int  # tokens in the pool
    allocated: int  # slots
    unshared: int  # slots that as many sequences would hold without sharing
    analytic: int  # slots that they need by arithmetic, with sharing
    maximum: int  # slots that a contiguous cache reserves: as many as any request may need,
    power_of_two: int  # the next power of two of what this one will,
    oracle: int  # or exactly that


def requests(dataset: str, count: int, *, equal: bool = False, **sampling: int) -> list[GenerateRequest]:
    """`equal`: all of the mean lengths."""
    rnd = random.Random(0)
    count *= 1 if dataset == "ShareGPT" else 6  # shorter ones: about as many tokens
    prompts, outputs = ([mean] * count if equal else lengths(mean, count, rnd) for mean in DATASETS[dataset])
    rnd.shuffle(outputs)
    return [
        GenerateRequest(key, tuple(range(prompt)), SamplingParams(max_tokens=output, **sampling), 0, frozenset())
        for key, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def simulate(work: Rows[GenerateRequest], block_size: int, every: int = 16) -> Iterator[Sample]:
    """Serve all requests, always as many as fit, and look at the pool from time to time while others wait."""
    blocks = BlockManager(POOL_SLOTS // block_size, block_size)
    scheduler = Scheduler(blocks, max_num_seqs=4096, max_num_batched_tokens=16_384)
    for request in work:
        scheduler.add(request)
    step, rnd = 0, random.Random(0)
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, sampled(plan, rnd))
        step += 1
        if step % every == 0 and scheduler.stats.waiting:
            yield look(scheduler)


def sampled(plan: Plan, rnd: random.Random) -> StepResult:
    """Return token 0 for each draw, and candidates for each live beam."""
    draws = [sequence for chunk in plan.chunks for sequence in chunk.draws]
    widths = {draw: sequence.request.sampling.beam_width for draw, sequence in enumerate(draws)}
    candidates = {draw: random_candidates(width, rnd) for draw, width in widths.items() if width > 1}
    return StepResult([[0] for _ in draws], candidates=candidates)


def random_candidates(width: int, rnd: random.Random) -> list[Candidate]:
    """Return candidates whose probabilities fall about as fast as those of a fairly confident language model."""
    log_prob, row = -rnd.expovariate(1), []
    for token in range(2 * width):
        row.append(Candidate(token, log_prob))
        log_prob -= rnd.expovariate(1)
    return row


def distinct_slots(beams: Rows[Sequence], size: int) -> int:
    """Slots that live beams need by arithmetic: beams that have a block's tokens and all before them in common need it
    once."""
    seen = set()
    for beam in beams:
        prefix = 0
        for start in range(0, beam.computed, size):
            prefix = hash((prefix, *beam.tokens[start : min(start + size, beam.computed)]))
            seen.add((start, prefix))
    return len(seen) * size


def look(scheduler: Scheduler) -> Sample:
    size = scheduler.blocks.block_size
    groups = scheduler.running
    totals = dict.fromkeys(("live", "unshared", "analytic", "maximum", "power_of_two", "oracle"), 0)
    for group in groups:
        prompt, samples = group.leader.num_prompt, len(group.sequences)
        shared = prompt // size * size if samples > 1 and group.forked else 0
        need = prompt + group.request.sampling.max_tokens
        totals["maximum"] += RESERVATION * samples
        totals["power_of_two"] += (1 << (need - 1).bit_length()) * samples
        totals["oracle"] += need * samples
        totals["live"] += shared
        totals["analytic"] += shared
        if group.beams:
            totals["analytic"] += distinct_slots(group.sequences, size) - shared
        for sequence in group.active:
            held = len(sequence.blocks) * size
            totals["unshared"] += held
            totals["live"] += sequence.computed - shared
            if not group.beams:
                totals["analytic"] += -(-sequence.computed // size) * size - shared
    return Sample(requests=len(groups), allocated=scheduler.blocks.num_used * size, **totals)


def utilisation(samples: Rows[Sample], of: str) -> float:
    """Token states over slots, over all moments."""
    return sum(one.live for one in samples) / sum(getattr(one, of) for one in samples)


def pages(count: int) -> tuple[list[Record], dict[str, dict[int, float]]]:
    records, curves = [], {}
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
    """Requests resident at once, against a contiguous cache that reserves RESERVATION slots for each. The limit is
    what the same requests would reach if no slot were wasted: long ones stay longer, so that lengths that vary leave
    less room than their means tell."""
    records = []
    for name, equal in (("lengths that vary", False), ("all of mean length", True)):
        samples = list(simulate(requests("ShareGPT", count, equal=equal), 16))
        resident = statistics.mean(one.requests for one in samples) / (POOL_SLOTS // RESERVATION)
        limit = RESERVATION / (sum(one.live for one in samples) / sum(one.requests for one in samples))
        records.append(Record(f"capacity ShareGPT, {name}", resident, "x", 6.0, limit))
    return records


def sharing(count: int, widths: Rows[int]) -> list[Record]:
    """Blocks saved by parallel sampling and by beam search over blocks without sharing, beside what arithmetic says."""
    records = []
    for dataset, kind, width in itertools.product(DATASETS, ("n", "beam_width"), widths):
        samples = list(simulate(requests(dataset, count, **{kind: width}), 16))
        unshared = sum(one.unshared for one in samples)
        saved = 100 * (1 - sum(one.allocated for one in samples) / unshared)
        analytic = 100 * (1 - sum(one.analytic for one in samples) / unshared)
        records.append(
            Record(f"saved by sharing {dataset} {kind}={width}", saved, "%", peers={"by arithmetic": analytic})
        )
    return records


def bookkeeping(steps: int) -> list[Record]:
    """Microseconds of schedule and commit, for each sequence that decodes."""
    records = []
    for running in (256, 1024):
        for context in (64, 1024):
            blocks = BlockManager(running * (context // 16 + 32), 16, caching=True)
            scheduler = Scheduler(blocks, max_num_seqs=running, max_num_batched_tokens=running * context)
            for key in range(running):
                prompt = tuple((key * 7919 + position) % 50_000 for position in range(context))
                scheduler.add(GenerateRequest(key, prompt, SamplingParams(max_tokens=500), 0, frozenset({2})))
            took = []
            for _ in range(steps + 1):
                started = time.perf_counter()
                plan = scheduler.schedule()
                assert plan is not None
                scheduler.commit(plan, StepResult.of_tokens([0] * running))
                took.append((time.perf_counter() - started) / running * 1e6)
            name = f"bookkeeping running={running} context={context}"
            records.append(Record(name, statistics.median(took[1:]), "us/sequence/step", target=3.0))
    return records


def attention_speed(rounds: int) -> list[Record]:
    """Milliseconds of one layer's attention and write for 16 sequences that decode at context 512, by block size, on
    this machine's device: 9 heads of 64, 3 KV heads, as in the demo model. The sizes take turns."""
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

    pools, took = {}, {size: list[float]() for size in BLOCK_SIZES}
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
            took[size].append(time.perf_counter() - started)
    return [
        Record(f"attention on {device.type}, block_size={size}", 1e3 * statistics.median(values), "ms/layer")
        for size, values in took.items()
    ]


def system_prompt(model: str, count: int) -> list[Record]:
    """The real model: requests that share a system prompt of 512 tokens (or half of what the model takes), one after
    the other, cache on and off."""
    from client.serving.repository import resolve_model
    from paged_backend.api.config import EngineConfig
    from paged_backend.engine.assembly import assemble
    from paged_bench._engine import serve

    rnd = random.Random(0)
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
            prompt = system + [rnd.randrange(vocab) for _ in range(24)]
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
    args = arguments(_parser(), argv, {"requests": LEAST_REQUESTS})
    count, widths = args.requests, WIDTHS[:2] if args.quick else WIDTHS
    records, curves = pages(count)
    records += capacity(count)
    records += sharing(count, widths)
    records += bookkeeping(min(count, 200))
    records += attention_speed(10 if args.quick else 50)
    records += system_prompt(args.model, 2 if args.quick else count // 10)
    publish(records, args.json, lambda file, caption: draw(records, curves, widths, file, caption))
    return 0


def _enough(text: str) -> int:
    """So many that some wait for room: the pool is looked at while they do."""
    if (value := count(text)) < LEAST_REQUESTS:
        raise ArgumentTypeError(f"{text!r}: must be at least {LEAST_REQUESTS}, or all have room at once")
    return value


def _parser() -> ArgumentParser:
    made = parser("memory", __doc__.partition("\n")[0])
    made.add_argument(
        "--requests", type=_enough, default=2000, metavar="N", help="to simulate; a tenth for the real model"
    )
    made.add_argument("--model", default="demo", help="for the part that runs a model")
    return made


def draw(
    records: Rows[Record], curves: dict[str, dict[int, float]], widths: Rows[int], file: Path, caption: str
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for dataset, curve in curves.items():
        left.plot(list(curve), list(curve.values()), marker="o", label=dataset)
    left.set_xscale("log", base=2)
    left.set_xticks(BLOCK_SIZES, [str(size) for size in BLOCK_SIZES])
    left.set_xlabel("tokens per block")
    left.set_ylabel("slots that hold no token, %")
    left.legend(frameon=False)
    by_name = {record.name: record for record in records}
    bars = {"pages of 16": by_name["waste ShareGPT block_size=16"].value} | dict(
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
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.text(0, -0.05, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
