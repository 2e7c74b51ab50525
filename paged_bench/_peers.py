"""The ways in which transformers can serve the same requests with the same weights."""

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
    """Load the model with transformers, with the same data type. Dummy weights are initialized again."""
    # It warns about things that a benchmark does on purpose.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if config.load_format == "dummy":
        with torch.device(device):
            own = AutoConfig.from_pretrained(loaded.path)
            return AutoModelForCausalLM.from_config(own, dtype=loaded.spec.dtype).eval()
    return AutoModelForCausalLM.from_pretrained(loaded.path, dtype=loaded.spec.dtype).to(device).eval()


def one_at_a_time(model: PreTrainedModel) -> Contestant:
    """Return a contestant that runs one request after the other."""

    def run(jobs: Sequence[Job]) -> Run:
        started = time.perf_counter()
        for job in jobs:
            _generate(model, [job])
        longest = max(len(job.prompt) + job.output - 1 for job in jobs)
        return Run(time.perf_counter() - started, len(jobs), peak_slots=longest, peak_tokens=longest)

    return run


def padded(model: PreTrainedModel, memory: float = math.inf) -> Contestant:
    """Return a contestant that runs one static batch.

    Prompts are padded to the longest one, and every row runs until the last one has finished. The batch has the first
    requests, as many as fit into `memory` bytes.
    """

    def run(jobs: Sequence[Job]) -> Run:
        jobs = jobs[: max(1, int(min(len(jobs), memory // _row_bytes(model, jobs))))]
        _release()
        started = time.perf_counter()
        stamps, outputs = _generate(model, jobs)
        seconds = time.perf_counter() - started
        slots = len(jobs) * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs) - 1)
        tokens = sum(len(job.prompt) + job.output - 1 for job in jobs)
        relative = [[when - started for when in one] for one in stamps]
        return Run(seconds, len(jobs), relative, outputs, slots, tokens)

    return run


def _row_bytes(model: PreTrainedModel, jobs: Sequence[Job]) -> int:
    """Return the size of the keys and values of one request in a padded batch."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    rows = max(job.n * job.beams for job in jobs)
    return rows * slot * (max(len(job.prompt) for job in jobs) + max(job.output for job in jobs))


def _release() -> None:
    """Free the unused memory of earlier contestants, which would count as used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _generate(model: PreTrainedModel, jobs: Sequence[Job]) -> tuple[list[list[float]], list[list[int]]]:
    """Return the times of each sequence's tokens, and the output tokens of each request's first sequence.

    There are no times for beams, which are known only at the end.
    """
    width, first = max(len(job.prompt) for job in jobs), jobs[0]
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs], device=model.device)
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs], device=model.device)
    steps, ends = max(job.output for job in jobs), []

    def record_time(ids: torch.Tensor, scores: Any) -> torch.Tensor:
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
        stopping_criteria=StoppingCriteriaList([record_time]),
    )
    assert out.shape == (len(jobs) * first.n, width + steps)
    stamps = [ends[: job.output] for job in jobs for _ in range(first.n)] if first.beams == 1 else []
    tokens = out[:: first.n, width:].tolist()
    return stamps, [row[: job.output] for row, job in zip(tokens, jobs, strict=True)]


def continuous(model: PreTrainedModel, budget: int, *, tuned: bool, sharing: bool) -> Contestant:
    """Return a contestant that uses the continuous batching of transformers.

    It gets the same hints as in `generate_batch`, and FlashAttention if that is installed. Setup and warm-up are not
    timed.

    Args:
        budget: tokens per step, unless it is tuned.
        tuned: use the settings that its guide recommends for throughput on a GPU (huggingface.co/docs/transformers,
            "Continuous batching"): the highest compile level and all free memory. With FlashAttention it then enables
            CUDA graphs, overlapping steps and the decode kernel itself.
        sharing: use its prefix cache.
    """

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
    """Return its settings, including those that it has chosen itself."""
    config = manager.continuous_batching_config
    varlen, decode = config.cuda_graph_booleans
    return {
        "attention": manager.model.config._attn_implementation,
        "scheduler": config.scheduler_type,
        "page_size": config.page_size,
        "num_blocks": config.num_blocks,
        "max_batch_tokens": config.max_batch_tokens,
        "max_requests_per_batch": config.max_requests_per_batch,
        "max_blocks_per_request": config.max_blocks_per_request,  # 0 disables the decode kernel
        "max_memory_percent": config.max_memory_percent,
        "prefix sharing": int(config.allow_block_sharing),
        "CUDA graphs, prompts": int(varlen),
        "CUDA graphs, decode": int(decode),
        "steps overlap": int(config.use_async_batching),
        "compiled, prompts": int(config.varlen_compile_config is not None),
        "compiled, decode": int(config.decode_compile_config is not None),
    }


def _pages(jobs: Sequence[Job]) -> int:
    """Return the number of blocks of 256 tokens: twice what all requests need at once."""
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
        # It logs errors and continues. Missing tokens would make it look fast.
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
