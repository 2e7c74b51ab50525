"""transformers' own ways to serve the same requests with the same weights."""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from paged_backend.api.config import EngineConfig
from paged_backend.loading.model_loader import LoadedModel
from paged_bench._workload import Contestant, Job, Run


def load(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> PreTrainedModel:
    """transformers' model as it comes, in the same type; with weights of its own where they are dummies."""
    # It tells at length what a benchmark of it does on purpose.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if config.load_format == "dummy":
        with torch.device(device):
            own = AutoConfig.from_pretrained(loaded.path)
            return AutoModelForCausalLM.from_config(own, dtype=loaded.spec.dtype).eval()
    return AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.spec.dtype).to(device).eval()


def one_at_a_time(model: PreTrainedModel) -> Contestant:
    def run(jobs: Sequence[Job]) -> Run:
        started = time.perf_counter()
        for job in jobs:
            _generate(model, [job])
        longest = max(len(job.prompt) + job.output - 1 for job in jobs)
        return Run(time.perf_counter() - started, len(jobs), peak_slots=longest, peak_tokens=longest)

    return run


def padded(model: PreTrainedModel, memory: float = math.inf) -> Contestant:
    """One static batch: every prompt is padded to the longest, every row runs until the last has ended. As many
    of the first requests are in it as `memory` bytes have room for."""

    def run(jobs: Sequence[Job]) -> Run:
        jobs = jobs[: max(1, int(min(len(jobs), memory // _row_bytes(model, jobs))))]
        _release()
        started = time.perf_counter()
        stamps, outputs = _generate(model, jobs)
        seconds = time.perf_counter() - started
        slots = len(jobs) * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs) - 1)
        tokens = sum(len(job.prompt) + job.output - 1 for job in jobs)
        begun = [[when - started for when in one] for one in stamps]
        return Run(seconds, len(jobs), begun, outputs, slots, tokens)

    return run


def _row_bytes(model: PreTrainedModel, jobs: Sequence[Job]) -> int:
    """Of keys and values of one request in a padded batch."""
    of = model.config.get_text_config()
    width = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
    slot = 2 * of.num_hidden_layers * of.num_key_value_heads * width * model.dtype.itemsize
    rows = max(job.n * job.beams for job in jobs)
    return rows * slot * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs))


def _release() -> None:
    """What contestants before have left: it would count as taken."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generate(model: PreTrainedModel, jobs: Sequence[Job]) -> tuple[list[list[float]], list[list[int]]]:
    """When each sequence had its tokens, and the tokens of each request's first. Beams are known at the end only."""
    width, first = max(len(job.prompt) for job in jobs), jobs[0]
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs], device=model.device)
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs], device=model.device)
    steps, ends = max(job.output for job in jobs), []

    def look(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        ends.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=first.n > 1,
        num_return_sequences=first.n,
        num_beams=first.beams,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([look]),
    )
    assert out.shape == (len(jobs) * first.n, width + steps)
    stamps = [ends[: job.output] for job in jobs for _ in range(first.n)] if first.beams == 1 else []
    tokens = out[:: first.n, width:].tolist()
    return stamps, [row[: job.output] for row, job in zip(tokens, jobs, strict=True)]


def continuous(model: PreTrainedModel, budget: int, *, tuned: bool, sharing: bool) -> Contestant:
    """transformers' own continuous batching, with the hints that its `generate_batch` gives and FlashAttention where
    the library finds it; prompts are looked up in its prefix cache with `sharing`. As it comes, with as many tokens in
    a step as ours; or tuned as its guide advises for throughput on a GPU (huggingface.co/docs/transformers,
    "Continuous batching"): compiled at the highest level, all free memory; with FlashAttention it takes CUDA graphs,
    steps that overlap and the decode kernel by itself. Its set-up and warm-up are not timed."""

    def run(jobs: Sequence[Job]) -> Run:
        first, rows = jobs[0], sum(job.n for job in jobs)
        if tuned:
            config = ContinuousBatchingConfig(default_compile_level=3, allow_block_sharing=sharing)
        else:
            config = ContinuousBatchingConfig(
                max_batch_tokens=budget, num_blocks=_pages(jobs), allow_block_sharing=sharing
            )
        hints = WorkloadHints(max(len(job.prompt) for job in jobs), max(job.output for job in jobs), rows)
        generation = GenerationConfig(
            do_sample=first.n > 1, num_return_sequences=first.n, eos_token_id=-1, pad_token_id=0
        )  # fmt: skip
        implementation = model.config._attn_implementation
        _release()
        try:
            with model.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=config,
                block=True,
                warmup=True,
                workload_hints=hints,
            ) as manager:
                manager.add_request([0] * 8, request_id="first", max_new_tokens=2)
                _collect(manager, first.n)
                return replace(_serve(manager, jobs, rows), settings=_settings(manager))
        finally:
            model.set_attn_implementation(implementation)

    return run


def _settings(manager: Any) -> dict[str, str | float]:
    """What it runs with, after it has filled in what was left to it."""
    config = manager.continuous_batching_config
    varlen, decode = config.cuda_graph_booleans
    return {
        "attention": manager.model.config._attn_implementation,
        "scheduler": config.scheduler_type,
        "page_size": config.page_size,
        "num_blocks": config.num_blocks,
        "max_batch_tokens": config.max_batch_tokens,
        "max_requests_per_batch": config.max_requests_per_batch,
        "max_blocks_per_request": config.max_blocks_per_request,  # 0: no decode kernel
        "max_memory_percent": config.max_memory_percent,
        "prefix sharing": int(config.allow_block_sharing),
        "CUDA graphs, prompts": int(varlen),
        "CUDA graphs, decode": int(decode),
        "steps overlap": int(config.use_async_batching),
        "compiled, prompts": int(config.varlen_compile_config is not None),
        "compiled, decode": int(config.decode_compile_config is not None),
    }


def _pages(jobs: Sequence[Job]) -> int:
    """Of 256 tokens: for all requests at once, and as many for what it keeps beside."""
    return 2 * sum(job.n * -(-(len(job.prompt) + job.output) // 256) for job in jobs)


def _serve(manager: Any, jobs: Sequence[Job], rows: int) -> Run:
    started = time.perf_counter()
    for key, job in enumerate(jobs):
        time.sleep(max(0.0, started + job.arrival - time.perf_counter()))
        manager.add_request(job.prompt, request_id=str(key), max_new_tokens=job.output, record_timestamps=True)
    results = _collect(manager, rows)
    seconds = time.perf_counter() - started
    stamps: list[list[float]] = []
    outputs: list[list[int]] = [[] for _ in jobs]
    for result in results:
        key = int(result.request_id.partition("__")[0])
        job, outputs[key] = jobs[key], result.generated_tokens
        # It logs errors and goes on: what is missing would make it look fast.
        assert len(result.generated_tokens) == job.output, (result.request_id, len(result.generated_tokens))
        stamps.append([when - started - job.arrival for when in result.timestamps or ()])
    return Run(seconds, len(jobs), stamps, outputs)


def _collect(manager: Any, count: int) -> list[Any]:
    results: list[Any] = []
    while len(results) < count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended early")
        elif result.is_finished():
            assert result.error is None, result.error
            results.append(result)
    return results
