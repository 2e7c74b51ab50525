"""The Prometheus metrics: their names, kinds and descriptions, and what each of them shows.

To add a metric, declare a family here. It shows a value of the scheduler's statistics, which no other module reads, or
an event, which the code that knows of it reports to `Metrics` by its name. Families of one event show it under several
names or with several buckets. `make reference` writes the descriptions to docs/reference/metrics.md. `paged_` metrics
are this engine's own; metrics with names of vLLM (`vllm:`) and TensorRT-LLM (`nv_`) keep existing dashboards
working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from paged_backend.scheduling.stats import Stats
from paged_backend.utils import restarts
from paged_backend.utils.machine import MemoryUsage

NO_LABELS: Mapping[str, str] = MappingProxyType({})
# Values of the label `reason` of paged_requests_finished_total.
OUTCOMES = ("stop", "length", "timeout", "cancelled", "error", "refused", "queue_full", "tenant_full")
# Values of the label `phase` of paged_step_seconds_total: the times in StepReport.
STEP_PHASES = ("schedule", "launch", "wait", "commit")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# vLLM's buckets, from which dashboards compute quantiles.
_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_VLLM_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_VLLM_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1, 2.5, 10),
)
_BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's
_VLLM_SAMPLES = (1, 2, 5, 10, 20)
_TRT_TOKENS = (10, 50, 100, 500, 1000)


def token_buckets(longest: int) -> tuple[int, ...]:
    """Return vLLM's buckets for numbers of tokens: 1, 2, 5, 10, 20, ... up to `longest`."""
    bounds = (factor * 10**power for power in range(len(str(longest))) for factor in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= longest)


def _usage(stats: Stats) -> float:
    """Return the fraction of the pool's blocks that requests use."""
    return stats.blocks_used / stats.blocks_total


Shown: TypeAlias = str | Callable[[Stats], float]  # the name of an event, or a value of the statistics


class Family(NamedTuple):
    """A metric name. Its series differ in the value of one label, `label`."""

    name: str
    kind: str  # "GAUGE", "COUNTER" or "HISTOGRAM"
    help: str
    series: Mapping[str, Shown]  # what each series shows, by the value of its label; "" without a label
    label: str = ""
    buckets: tuple[float, ...] | None = None  # buckets of a histogram; None: token_buckets(max_model_len)
    labels: Mapping[str, str] = NO_LABELS  # labels that all series have
    bulk: bool = False  # whether observations are added up and reported at intervals, because they are frequent


def _gauge(name: str, help: str, shows: Shown | Mapping[str, Shown], label: str = "") -> Family:
    return Family(name, "GAUGE", help, shows if isinstance(shows, Mapping) else {"": shows}, label)


def _counter(name: str, help: str, shows: Shown | Mapping[str, Shown], label: str = "") -> Family:
    return _gauge(name, help, shows, label)._replace(kind="COUNTER")


def _histogram(
    name: str,
    help: str,
    event: str,
    buckets: tuple[float, ...] | None = None,
    *,
    labels: Mapping[str, str] = NO_LABELS,
    bulk: bool = False,
) -> Family:
    return Family(name, "HISTOGRAM", help, {"": event}, buckets=buckets, labels=labels, bulk=bulk)


_FAMILIES = (
    _gauge(
        "paged_kv_blocks",
        "Blocks of the KV cache, by state: used (held by requests), free (empty), cached (kept for their content until"
        " the room is needed); of those used, shared (held by several sequences) and pinned (held by sessions between"
        " turns)",
        {
            "total": lambda stats: stats.blocks_total,
            "used": lambda stats: stats.blocks_used,
            "free": lambda stats: stats.blocks_total - stats.blocks_used - stats.blocks_cached,
            "cached": lambda stats: stats.blocks_cached,
            "shared": lambda stats: stats.blocks_shared,
            "pinned": lambda stats: stats.blocks_pinned,
        },
        label="state",
    ),
    _counter(
        "paged_prefix_cache_hit_tokens_total",
        "Prompt tokens found in the prefix cache",
        lambda stats: stats.cached_tokens,
    ),
    _counter("paged_kv_evictions_total", "Cached blocks evicted to make room", lambda stats: stats.evictions),
    _counter("paged_kv_copies_total", "Blocks copied on write", lambda stats: stats.copies),
    _counter(
        "paged_kernel_compilations_total",
        "GPU kernels compiled, or loaded from Triton's cache, after the model was ready. Each delays all requests; the"
        " log has their names",
        lambda stats: stats.compilations,
    ),
    _gauge(
        "paged_requests",
        "Requests in the engine, by state. Requests that wait for their grammar, their adapter, or cached blocks from"
        " disk or a remote store count as waiting",
        {
            "running": lambda stats: stats.running,
            "waiting": lambda stats: stats.waiting,
        },
        label="state",
    ),
    _counter(
        "paged_requests_finished_total",
        "Finished requests, by reason: stop, length, timeout, cancelled, error (an internal error), queue_full or"
        " tenant_full (rejected because of max_queue_size or max_tenant_requests), refused (rejected for another"
        " reason, also after admission: an invalid grammar or adapter, a response above max_response_mib)",
        dict.fromkeys(OUTCOMES, "finished"),
        label="reason",
    ),
    _counter("paged_prompt_tokens_total", "Prompt tokens of accepted requests", "prompt_tokens"),
    _counter("paged_generation_tokens_total", "Generated tokens", "generated_tokens"),
    _counter(
        "paged_preemptions_total",
        "Preempted requests, by what happens to their KV cache: recompute or swap (to host memory)",
        {
            "recompute": lambda stats: stats.recomputed,
            "swap": lambda stats: stats.swapped,
        },
        label="kind",
    ),
    _counter(
        "paged_restarts_total",
        "Restarts of the server by `paged serve --restart`, by reason: exited (tritonserver), stub_died (the engine's"
        " process), not_responding (no token in time), engine_failed (the engine"
        " reports that it has failed, or probes end with errors), start_failed (the new"
        " server did not become ready)",
        dict.fromkeys(restarts.REASONS, "restarts"),
        label="reason",
    ),
    _counter(
        "paged_migrated_requests_total",
        "Requests that were moved to a newer instance, because Triton loaded the model again; each move counts",
        "moved",
    ),
    _gauge("paged_sessions", "Open sessions", "sessions"),
    _gauge(
        "paged_sleeping",
        "1 while the memory of the model is released (`paged sleep`), else 0",
        lambda stats: stats.sleeping,
    ),
    _gauge(
        "paged_host_blocks",
        "Blocks of host memory, by state: used (held by preempted requests), cached (kept for their content)",
        {
            "total": lambda stats: stats.host_total,
            "used": lambda stats: stats.host_used,
            "cached": lambda stats: stats.host_cached,
        },
        label="state",
    ),
    _gauge(
        "paged_recurrent_states",
        "States of recurrent layers in the KV cache, by state: used (held by requests and sessions), cached (kept for"
        " their content). 0 for a model without recurrent layers",
        {
            "used": lambda stats: stats.states_used,
            "cached": lambda stats: stats.states_cached,
        },
        label="state",
    ),
    _counter(
        "paged_host_cache_hit_tokens_total",
        "Prompt tokens found in the prefix cache that were in host memory",
        lambda stats: stats.host_tokens,
    ),
    _gauge(
        "paged_disk_tier_up",
        "1 while cached blocks are kept on disk; 0 without disk_cache_dir, or after a disk error",
        lambda stats: stats.get("disk_up"),
    ),
    _gauge("paged_disk_blocks", "Cached blocks on disk", lambda stats: stats.get("disk_blocks")),
    _counter("paged_disk_blocks_read_total", "Blocks read from disk", lambda stats: stats.get("disk_read")),
    _counter("paged_disk_blocks_written_total", "Blocks written to disk", lambda stats: stats.get("disk_written")),
    _gauge(
        "paged_remote_tier_up",
        "1 while cached blocks are shared through a remote store; 0 without remote_cache_url, or while the store fails",
        lambda stats: stats.get("remote_up"),
    ),
    _gauge(
        "paged_remote_bytes",
        "Bytes in the remote store that this server has written and not deleted",
        lambda stats: stats.get("remote_bytes"),
    ),
    _counter(
        "paged_remote_blocks_read_total", "Blocks read from the remote store", lambda stats: stats.get("remote_read")
    ),
    _counter(
        "paged_remote_blocks_written_total",
        "Blocks written to the remote store",
        lambda stats: stats.get("remote_written"),
    ),
    _counter(
        "paged_remote_tier_disabled_total",
        "How often the remote store was put out of use because it failed, was too slow, or had a damaged or forged"
        " block",
        lambda stats: stats.get("remote_disabled"),
    ),
    _gauge(
        "paged_cache_tier_block_seconds",
        "Measured seconds to get a block, by tier: compute (its tokens, without a cache), host (copied to the device),"
        " disk, remote. 0: not measured",
        {
            "compute": lambda stats: stats.compute_seconds,
            "host": lambda stats: stats.host_seconds,
            "disk": lambda stats: stats.get("disk_seconds"),
            "remote": lambda stats: stats.get("remote_seconds"),
        },
        label="tier",
    ),
    _counter(
        "paged_kv_swapped_blocks_total",
        "Blocks copied from device to host (out) and back (in)",
        {
            "out": lambda stats: stats.moves_out,
            "in": lambda stats: stats.moves_in,
        },
        label="direction",
    ),
    _histogram(
        "paged_time_to_first_token_seconds", "Time from arrival to the first token", "time_to_first_token", _SECONDS
    ),
    _histogram(
        "paged_inter_token_latency_seconds",
        "Time between two tokens of a sample, one value per token after the first. Tokens of one step, as with"
        " speculative decoding, share its time equally",
        "inter_token_latency",
        _PER_TOKEN,
        bulk=True,
    ),
    _histogram(
        "paged_time_per_output_token_seconds",
        "Mean time per output token after the first, one value per request",
        "time_per_output_token",
        _SECONDS,
    ),
    _histogram("paged_request_latency_seconds", "Time from arrival to the last token", "request_latency", _SECONDS),
    _histogram("paged_queue_time_seconds", "Time from arrival to the first step", "queue_time", _SECONDS),
    _histogram("paged_request_prompt_tokens", "Prompt tokens of a request", "request_prompt_tokens"),
    _histogram(
        "paged_request_generation_tokens",
        "Generated tokens of a request, of all its samples",
        "request_generated_tokens",
    ),
    _histogram("paged_batch_size", "Sequences computed in a step", "batch_size", _BATCH_SIZE, bulk=True),
    _histogram(
        "paged_step_tokens", "Tokens computed in a step, of prompts and outputs", "step_tokens", _STEP_TOKENS, bulk=True
    ),
    _counter(
        "paged_steps_total",
        "Steps, by whether a CUDA graph ran the forward pass",
        dict.fromkeys(("yes", "no"), "steps"),
        label="cuda_graph",
    ),
    _counter(
        "paged_step_seconds_total",
        "Time of the engine's thread in steps, by phase: schedule (with masks of structured outputs); launch (packing,"
        " copies of blocks, enqueuing; on a CPU the whole forward pass); wait (for the device); commit (storing tokens,"
        " freeing blocks)",
        dict.fromkeys(STEP_PHASES, "step_seconds"),
        label="phase",
    ),
    _gauge(
        "paged_memory_bytes",
        "Memory in use, updated once a second while there is work: cpu (the model's process), gpu (tensors on its GPU;"
        " with several GPUs of the first process), pinned (host blocks, and the weights of a model that is asleep)",
        dict.fromkeys(MemoryUsage._fields, "memory"),
        label="kind",
    ),
    _counter(
        "paged_guessed_tokens_total", "Draft tokens verified by speculative decoding", lambda stats: stats.draft_tokens
    ),
    _counter(
        "paged_accepted_tokens_total",
        "Draft tokens accepted by speculative decoding",
        lambda stats: stats.accepted_tokens,
    ),
    _gauge("vllm:num_requests_running", "Running requests", lambda stats: stats.running),
    _gauge("vllm:num_requests_waiting", "Waiting requests", lambda stats: stats.waiting),
    _gauge("vllm:kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1", _usage),
    _gauge(
        "vllm:gpu_cache_usage_perc",
        "vllm:kv_cache_usage_perc under the name of earlier versions",
        _usage,
    ),
    _counter("vllm:num_preemptions_total", "Preempted requests", lambda stats: stats.preemptions),
    _counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache", lambda stats: stats.cached_tokens),
    _counter(
        "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache", lambda stats: stats.queried_tokens
    ),
    _counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified", lambda stats: stats.draft_tokens),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted", lambda stats: stats.accepted_tokens
    ),
    _counter("vllm:prompt_tokens_total", "Prompt tokens of accepted requests", "prompt_tokens"),
    _counter("vllm:generation_tokens_total", "Generated tokens", "generated_tokens"),
    _histogram(
        "vllm:time_to_first_token_seconds",
        "Time from arrival to the first token",
        "time_to_first_token",
        _VLLM_FIRST_TOKEN,
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Time between two tokens of a sample, one value per token after the first",
        "inter_token_latency",
        _VLLM_PER_TOKEN,
        bulk=True,
    ),
    _histogram(
        "vllm:time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds under the name of earlier versions",
        "inter_token_latency",
        _VLLM_PER_TOKEN,
        bulk=True,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token after the first, one value per request",
        "time_per_output_token",
        _VLLM_PER_TOKEN,
    ),
    _histogram("vllm:request_queue_time_seconds", "Time from arrival to the first step", "queue_time", _VLLM_LATENCY),
    _histogram("vllm:iteration_tokens_total", "Tokens computed in a step", "step_tokens", _STEP_TOKENS, bulk=True),
    _histogram(
        "vllm:e2e_request_latency_seconds", "Time from arrival to the last token", "request_latency", _VLLM_LATENCY
    ),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", "request_prompt_tokens"),
    _histogram(
        "vllm:request_generation_tokens",
        "Generated tokens of a request, of all its samples",
        "request_generated_tokens",
    ),
    _histogram("vllm:request_params_n", "Parameter n of a request", "request_n", _VLLM_SAMPLES),
    _gauge(
        "nv_trt_llm_kv_cache_block_metrics",
        "TensorRT-LLM's KV cache metrics: blocks max, used, free, reused, tokens_per block, and the used fraction",
        {
            "max": lambda stats: stats.blocks_total,
            "used": lambda stats: stats.blocks_used,
            "free": lambda stats: stats.blocks_total - stats.blocks_used,
            "tokens_per": lambda stats: stats.block_size,
            "reused": lambda stats: stats.cached_tokens // stats.block_size,
            "fraction": _usage,
        },
        label="kv_cache_block_type",
    ),
    _gauge(
        "nv_trt_llm_request_metrics",
        "TensorRT-LLM's request metrics: active and scheduled (both running), context (running, with a prefill in the"
        " last step), waiting, and max",
        {
            "active": lambda stats: stats.running,
            "scheduled": lambda stats: stats.running,
            "context": lambda stats: stats.context_requests,
            "waiting": lambda stats: stats.waiting,
            "max": "max_requests",
        },
        label="request_type",
    ),
    _gauge(
        "nv_trt_llm_inflight_batcher_metrics",
        "TensorRT-LLM's metrics of the last step: total_context_tokens (prefilled), generation_requests (running"
        " without prefill), paused_requests (preempted); micro_batch_id is always 0",
        {
            "total_context_tokens": lambda stats: stats.context_tokens,
            "generation_requests": lambda stats: stats.generation_requests,
            "micro_batch_id": lambda stats: 0,
            "paused_requests": lambda stats: stats.paused,
        },
        label="inflight_batcher_specific_metric",
    ),
    _gauge(
        "nv_trt_llm_general_metrics",
        "TensorRT-LLM's general metrics: iteration_counter (steps) and timestamp (of the last step, in seconds)",
        {
            "iteration_counter": lambda stats: stats.steps,
            "timestamp": "step_time",
        },
        label="general_type",
    ),
    _gauge(
        "nv_trt_llm_runtime_memory_metrics",
        "TensorRT-LLM's memory metrics in bytes, updated once a second while there is work: cpu (the model's process),"
        " gpu (tensors on its GPU; with several GPUs of the first process), pinned (host blocks)",
        dict.fromkeys(MemoryUsage._fields, "memory"),
        label="memory_type",
    ),
    _histogram(
        "nv_llm_input_token_len",
        "Prompt tokens of a request, with TensorRT-LLM's buckets",
        "request_prompt_tokens",
        _TRT_TOKENS,
        labels={"response_metric_type": "total_input_tokens"},
    ),
    _histogram(
        "nv_llm_output_token_len",
        "Generated tokens of a request, with TensorRT-LLM's buckets",
        "request_generated_tokens",
        _TRT_TOKENS,
        labels={"response_metric_type": "total_output_tokens"},
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}
