"""Output tokens per second over requests of mixed lengths, beside transformers' three ways to serve them.

All contestants run the same weights in the same dtype on the same device and generate the same number of tokens
for each request: end of sequence is ignored. Only the tokens that a request asked for count.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from paged_backend.bench._engine import serve
from paged_backend.bench._report import Record, alternate, median_ratio, parser, publish
from paged_backend.config import EngineConfig
from paged_backend.request import GenerateRequest, SamplingParams
from paged_backend.service import Assembly, assemble
from paged_backend.serving.tritonserver import resolve_model

OURS = "paged"


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    output: int  # tokens to generate


@dataclass(frozen=True)
class Run:
    seconds: float
    peak_slots: int  # key/value slots held at once at the most
    peak_tokens: int  # tokens that were in them


def workload(count: int, vocab_size: int) -> list[Job]:
    """Log-normal lengths, most of them short and a few long, as people's requests are."""
    rnd = random.Random(0)

    def length(median: int, most: int) -> int:
        return max(4, min(most, round(rnd.lognormvariate(0, 0.8) * median)))

    return [Job([rnd.randrange(vocab_size) for _ in range(length(64, 400))], length(32, 160)) for _ in range(count)]


def run_paged(assembly: Assembly, jobs: Sequence[Job]) -> Run:
    """The engine on its own thread, as the server runs it, with all requests put in at once."""
    started = time.perf_counter()
    requests = [
        GenerateRequest.admit(
            key, job.prompt, SamplingParams(max_tokens=job.output, temperature=0), 0, frozenset(), assembly.limits
        )
        for key, job in enumerate(jobs)
    ]
    tokens, peak = 0, (0, 0)
    held = [len(job.prompt) for job in jobs]
    for output in serve(assembly, requests):
        for delta in output.deltas:
            tokens += len(delta.token_ids)
            held[delta.key] = 0 if delta.last else held[delta.key] + len(delta.token_ids)
        if output.stats.waiting == 0 and output.stats.running == len(jobs):
            # The newest token of a sequence is not in the pool yet.
            live = sum(held) - len(jobs)
            peak = max(peak, (output.stats.blocks_used * assembly.scheduler.blocks.block_size, live))
    seconds = time.perf_counter() - started
    assert tokens == sum(job.output for job in jobs)
    return Run(seconds, *peak)


def run_one_at_a_time(model: PreTrainedModel, jobs: Sequence[Job]) -> Run:
    started = time.perf_counter()
    for job in jobs:
        _generate(model, [job])
    longest = max(len(job.prompt) + job.output - 1 for job in jobs)
    return Run(time.perf_counter() - started, longest, longest)


def run_padded(model: PreTrainedModel, jobs: Sequence[Job]) -> Run:
    """One static batch: every prompt is padded to the longest, every row runs until the last has ended."""
    started = time.perf_counter()
    _generate(model, jobs)
    seconds = time.perf_counter() - started
    slots = len(jobs) * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs) - 1)
    return Run(seconds, slots, sum(len(job.prompt) + job.output - 1 for job in jobs))


def _generate(model: PreTrainedModel, jobs: Sequence[Job]) -> None:
    width = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs], device=model.device)
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs], device=model.device)
    steps = max(job.output for job in jobs)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert out.shape[1] == width + steps


def run_continuous(model: PreTrainedModel, jobs: Sequence[Job], budget: int) -> Run:
    """transformers' own continuous batching, as it comes, with the same budget of tokens in one step."""
    config = ContinuousBatchingConfig(max_batch_tokens=budget, num_blocks=2 * len(jobs))
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True
    ) as manager:
        manager.add_request([0], request_id="first", max_new_tokens=1)  # sets up its pool
        while manager.get_result(request_id="first", timeout=1) is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching did not start")
        started = time.perf_counter()
        for key, job in enumerate(jobs):
            manager.add_request(job.prompt, request_id=str(key), max_new_tokens=job.output)
        ended = 0
        while ended < len(jobs):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended early")
            elif result.is_finished():
                assert result.error is None, result.error
                assert len(result.generated_tokens) == jobs[int(result.request_id)].output
                ended += 1
        return Run(time.perf_counter() - started, 0, 0)


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    # transformers tells at length what a benchmark of it does on purpose.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    count, rounds = (8, 1) if args.quick else (args.requests, args.rounds)
    model = resolve_model(args.model)
    budget = max(512, count)
    options = {"num_gpu_blocks_override": 35 * count, "max_num_seqs": count, "max_num_batched_tokens": budget}
    options["enable_prefix_caching"] = False  # every round sends the same prompts
    assembly = assemble(EngineConfig.from_options({"model": model, "dtype": args.dtype} | options))
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=assembly.loaded.spec.dtype).to(assembly.device).eval()
    jobs = workload(count, assembly.loaded.spec.vocab_size)
    asked = sum(job.output for job in jobs)
    runs: dict[str, Run] = {}

    def timed(name: str, run: Callable[[], Run]) -> Callable[[], float]:
        def once() -> float:
            runs[name] = run()
            return asked / runs[name].seconds

        return once

    figures = alternate(
        {
            OURS: timed(OURS, lambda: run_paged(assembly, jobs)),
            "transformers, continuous": timed("cb", lambda: run_continuous(peer, jobs, budget)),
            "transformers, one padded batch": timed("padded", lambda: run_padded(peer, jobs)),
            "transformers, one at a time": timed("alone", lambda: run_one_at_a_time(peer, jobs)),
        },
        rounds,
    )
    prompt = sum(len(job.prompt) for job in jobs)
    print(f"{count} requests at once, {prompt} prompt and {asked} output tokens, medians of {rounds} rounds")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    peers = {name: value for name, value in medians.items() if name != OURS}
    ratios = {name: median_ratio(figures[OURS], values) for name, values in figures.items() if name != OURS}
    records = [
        Record("output_throughput", medians[OURS], "tokens/s", peers=peers),
        *(Record(f"output_throughput_ratio ({name})", ratio, "x") for name, ratio in ratios.items()),
        Record(
            "kv_slots_per_token_at_peak",
            runs[OURS].peak_slots / runs[OURS].peak_tokens,
            "slots/token",
            limit=1.0,
            peers={"transformers, one padded batch": runs["padded"].peak_slots / runs["padded"].peak_tokens},
        ),
    ]
    publish(records, args.json, lambda file, caption: draw(medians, file, caption))
    return 0


def _parser() -> ArgumentParser:
    made = parser("throughput", __doc__.partition("\n")[0])
    made.add_argument("--model", default="demo", help="a Hugging Face directory, or 'demo'")
    made.add_argument("--dtype", default="float32", help="of weights, keys and values")
    made.add_argument("--requests", type=int, default=32, metavar="N")
    made.add_argument("--rounds", type=int, default=3, metavar="N")
    return made


def draw(medians: dict[str, float], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    names = list(medians)[::-1]
    bars = axes.barh(names, [medians[name] for name in names], color=["#b0b0b0"] * (len(names) - 1) + ["#76b900"])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel("output tokens per second, median")
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0, -0.08, caption, fontsize=6, color="#606060")
    figure.savefig(file, dpi=150, bbox_inches="tight")
