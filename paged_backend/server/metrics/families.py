"""The Prometheus metrics: names, kinds and descriptions.

To add a metric, declare its Family, and for a gauge or a counter of the scheduler an entry in metric_series.py.
`make reference` writes the descriptions to docs/reference/metrics.md. `paged_` metrics are this engine's own; those of
vLLM (`vllm:`) and TensorRT-LLM (`nv_`) keep existing dashboards working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from paged_backend.scheduling.stats import SchedulerStats

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


class Family(NamedTuple):
    """A metric name with its kind and description; its series differ in labels."""

    name: str
    kind: str  # "GAUGE", "COUNTER" or "HISTOGRAM"
    help: str
    buckets: tuple[float, ...] | None = None  # buckets of a histogram; None: token_buckets(max_model_len)
    labels: Mapping[str, str] = NO_LABELS  # labels of a histogram


_FAMILIES = (
    Family(
        "paged_kv_blocks",
        "GAUGE",
        "Blocks of the KV cache, by state: used (held by requests), free (empty), cached (kept for their content until"
        " the room is needed); of those used, shared (held by several sequences) and pinned (held by sessions between"
        " turns)",
    ),
    Family("paged_prefix_cache_hit_tokens_total", "COUNTER", "Prompt tokens found in the prefix cache"),
    Family("paged_kv_evictions_total", "COUNTER", "Cached blocks evicted to make room"),
    Family("paged_kv_copies_total", "COUNTER", "Blocks copied on write"),
    Family(
        "paged_kernel_compilations_total",
        "COUNTER",
        "GPU kernels compiled, or loaded from Triton's cache, after the model was ready. Each delays all requests; the"
        " log has their names",
    ),
    Family(
        "paged_requests",
        "GAUGE",
        "Requests in the engine, by state. Requests that wait for their grammar, their adapter, or cached blocks from"
        " disk or a remote store count as waiting",
    ),
    Family(
        "paged_requests_finished_total",
        "COUNTER",
        "Finished requests, by reason: stop, length, timeout, cancelled, error (an internal error), queue_full or"
        " tenant_full (rejected because of max_queue_size or max_tenant_requests), refused (rejected for another"
        " reason, also after admission: an invalid grammar or adapter, a response above max_response_mib)",
    ),
    Family("paged_prompt_tokens_total", "COUNTER", "Prompt tokens of accepted requests"),
    Family("paged_generation_tokens_total", "COUNTER", "Generated tokens"),
    Family(
        "paged_preemptions_total",
        "COUNTER",
        "Preempted requests, by what happens to their KV cache: recompute or swap (to host memory)",
    ),
    Family(
        "paged_restarts_total",
        "COUNTER",
        "Restarts of the server by `paged serve --restart`, by reason: exited (tritonserver), stub_died (the engine's"
        " process), not_responding (no token in time), engine_failed (the engine"
        " reports that it has failed, or probes end with errors), start_failed (the new"
        " server did not become ready)",
    ),
    Family(
        "paged_migrated_requests_total",
        "COUNTER",
        "Requests that were moved to a newer instance, because Triton loaded the model again; each move counts",
    ),
    Family("paged_sessions", "GAUGE", "Open sessions"),
    Family("paged_sleeping", "GAUGE", "1 while the memory of the model is released (`paged sleep`), else 0"),
    Family(
        "paged_host_blocks",
        "GAUGE",
        "Blocks of host memory, by state: used (held by preempted requests), cached (kept for their content)",
    ),
    Family(
        "paged_state_slots",
        "GAUGE",
        "Slots for states of recurrent layers, by state: used (held by requests), checkpoint (kept for the prefix cache"
        " and for sessions), free (empty). 0 for a model without recurrent layers",
    ),
    Family(
        "paged_host_state_slots",
        "GAUGE",
        "Slots of host memory for states of recurrent layers, by state: used (held by preempted requests)",
    ),
    Family(
        "paged_host_cache_hit_tokens_total",
        "COUNTER",
        "Prompt tokens found in the prefix cache that were in host memory",
    ),
    Family(
        "paged_disk_tier_up",
        "GAUGE",
        "1 while cached blocks are kept on disk; 0 without disk_cache_dir, or after a disk error",
    ),
    Family("paged_disk_blocks", "GAUGE", "Cached blocks on disk"),
    Family("paged_disk_blocks_read_total", "COUNTER", "Blocks read from disk"),
    Family("paged_disk_blocks_written_total", "COUNTER", "Blocks written to disk"),
    Family(
        "paged_remote_tier_up",
        "GAUGE",
        "1 while cached blocks are shared through a remote store; 0 without remote_cache_url, or while the store fails",
    ),
    Family("paged_remote_bytes", "GAUGE", "Bytes in the remote store that this server has written and not deleted"),
    Family("paged_remote_blocks_read_total", "COUNTER", "Blocks read from the remote store"),
    Family("paged_remote_blocks_written_total", "COUNTER", "Blocks written to the remote store"),
    Family(
        "paged_remote_tier_disabled_total",
        "COUNTER",
        "How often the remote store was put out of use because it failed, was too slow, or had a damaged or forged"
        " block",
    ),
    Family(
        "paged_cache_tier_block_seconds",
        "GAUGE",
        "Measured seconds to get a block, by tier: compute (its tokens, without a cache), host (copied to the device),"
        " disk, remote. 0: not measured",
    ),
    Family("paged_kv_swapped_blocks_total", "COUNTER", "Blocks copied from device to host (out) and back (in)"),
    Family("paged_time_to_first_token_seconds", "HISTOGRAM", "Time from arrival to the first token", _SECONDS),
    Family(
        "paged_inter_token_latency_seconds",
        "HISTOGRAM",
        "Time between two tokens of a sample, one value per token after the first. Tokens of one step, as with"
        " speculative decoding, share its time equally",
        _PER_TOKEN,
    ),
    Family(
        "paged_time_per_output_token_seconds",
        "HISTOGRAM",
        "Mean time per output token after the first, one value per request",
        _SECONDS,
    ),
    Family("paged_request_latency_seconds", "HISTOGRAM", "Time from arrival to the last token", _SECONDS),
    Family("paged_queue_time_seconds", "HISTOGRAM", "Time from arrival to the first step", _SECONDS),
    Family("paged_request_prompt_tokens", "HISTOGRAM", "Prompt tokens of a request"),
    Family("paged_request_generation_tokens", "HISTOGRAM", "Generated tokens of a request, of all its samples"),
    Family("paged_batch_size", "HISTOGRAM", "Sequences computed in a step", _BATCH_SIZE),
    Family("paged_step_tokens", "HISTOGRAM", "Tokens computed in a step, of prompts and outputs", _STEP_TOKENS),
    Family("paged_steps_total", "COUNTER", "Steps, by whether a CUDA graph ran the forward pass"),
    Family(
        "paged_step_seconds_total",
        "COUNTER",
        "Time of the engine's thread in steps, by phase: schedule (with masks of structured outputs); launch (packing,"
        " copies of blocks, enqueuing; on a CPU the whole forward pass); wait (for the device); commit (storing tokens,"
        " freeing blocks)",
    ),
    Family(
        "paged_memory_bytes",
        "GAUGE",
        "Memory in use, updated once a second while there is work: cpu (the model's process), gpu (tensors on its GPU;"
        " with several GPUs of the first process), pinned (host blocks, and the weights of a model that is asleep)",
    ),
    Family("paged_guessed_tokens_total", "COUNTER", "Draft tokens verified by speculative decoding"),
    Family("paged_accepted_tokens_total", "COUNTER", "Draft tokens accepted by speculative decoding"),
    Family("vllm:num_requests_running", "GAUGE", "Running requests"),
    Family("vllm:num_requests_waiting", "GAUGE", "Waiting requests"),
    Family("vllm:kv_cache_usage_perc", "GAUGE", "Used fraction of the KV cache, 0 to 1"),
    Family("vllm:gpu_cache_usage_perc", "GAUGE", "vllm:kv_cache_usage_perc under the name of earlier versions"),
    Family("vllm:num_preemptions_total", "COUNTER", "Preempted requests"),
    Family("vllm:prefix_cache_hits_total", "COUNTER", "Tokens found in the prefix cache"),
    Family("vllm:prefix_cache_queries_total", "COUNTER", "Tokens looked up in the prefix cache"),
    Family("vllm:spec_decode_num_draft_tokens_total", "COUNTER", "Draft tokens verified"),
    Family("vllm:spec_decode_num_accepted_tokens_total", "COUNTER", "Draft tokens accepted"),
    Family("vllm:prompt_tokens_total", "COUNTER", "Prompt tokens of accepted requests"),
    Family("vllm:generation_tokens_total", "COUNTER", "Generated tokens"),
    Family("vllm:time_to_first_token_seconds", "HISTOGRAM", "Time from arrival to the first token", _VLLM_FIRST_TOKEN),
    Family(
        "vllm:inter_token_latency_seconds",
        "HISTOGRAM",
        "Time between two tokens of a sample, one value per token after the first",
        _VLLM_PER_TOKEN,
    ),
    Family(
        "vllm:time_per_output_token_seconds",
        "HISTOGRAM",
        "vllm:inter_token_latency_seconds under the name of earlier versions",
        _VLLM_PER_TOKEN,
    ),
    Family(
        "vllm:request_time_per_output_token_seconds",
        "HISTOGRAM",
        "Mean time per output token after the first, one value per request",
        _VLLM_PER_TOKEN,
    ),
    Family("vllm:request_queue_time_seconds", "HISTOGRAM", "Time from arrival to the first step", _VLLM_LATENCY),
    Family("vllm:iteration_tokens_total", "HISTOGRAM", "Tokens computed in a step", _STEP_TOKENS),
    Family("vllm:e2e_request_latency_seconds", "HISTOGRAM", "Time from arrival to the last token", _VLLM_LATENCY),
    Family("vllm:request_prompt_tokens", "HISTOGRAM", "Prompt tokens of a request"),
    Family("vllm:request_generation_tokens", "HISTOGRAM", "Generated tokens of a request, of all its samples"),
    Family("vllm:request_params_n", "HISTOGRAM", "Parameter n of a request", _VLLM_SAMPLES),
    Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "GAUGE",
        "TensorRT-LLM's KV cache metrics: blocks max, used, free, reused, tokens_per block, and the used fraction",
    ),
    Family(
        "nv_trt_llm_request_metrics",
        "GAUGE",
        "TensorRT-LLM's request metrics: active and scheduled (both running), context (running, with a prefill in the"
        " last step), waiting, and max",
    ),
    Family(
        "nv_trt_llm_inflight_batcher_metrics",
        "GAUGE",
        "TensorRT-LLM's metrics of the last step: total_context_tokens (prefilled), generation_requests (running"
        " without prefill), paused_requests (preempted); micro_batch_id is always 0",
    ),
    Family(
        "nv_trt_llm_general_metrics",
        "GAUGE",
        "TensorRT-LLM's general metrics: iteration_counter (steps) and timestamp (of the last step, in seconds)",
    ),
    Family(
        "nv_trt_llm_runtime_memory_metrics",
        "GAUGE",
        "TensorRT-LLM's memory metrics in bytes, updated once a second while there is work: cpu (the model's process),"
        " gpu (tensors on its GPU; with several GPUs of the first process), pinned (host blocks)",
    ),
    Family(
        "nv_llm_input_token_len",
        "HISTOGRAM",
        "Prompt tokens of a request, with TensorRT-LLM's buckets",
        _TRT_TOKENS,
        {"response_metric_type": "total_input_tokens"},
    ),
    Family(
        "nv_llm_output_token_len",
        "HISTOGRAM",
        "Generated tokens of a request, with TensorRT-LLM's buckets",
        _TRT_TOKENS,
        {"response_metric_type": "total_output_tokens"},
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}


class Series(NamedTuple):
    """A gauge or a counter that shows a value of the scheduler's statistics."""

    family: str
    value: Callable[[SchedulerStats], float]
    labels: Mapping[str, str] = NO_LABELS


def _labelled(family: str, label: str, values: Mapping[str, Callable[[SchedulerStats], float]]) -> tuple[Series, ...]:
    return tuple(Series(family, value, {label: name}) for name, value in values.items())


GAUGES = (
    *_labelled(
        "paged_kv_blocks",
        "state",
        {
            "total": lambda stats: stats.blocks_total,
            "used": lambda stats: stats.blocks_used,
            "free": lambda stats: stats.blocks_free,
            "cached": lambda stats: stats.blocks_cached,
            "shared": lambda stats: stats.blocks_shared,
            "pinned": lambda stats: stats.blocks_pinned,
        },
    ),
    *_labelled(
        "paged_host_blocks",
        "state",
        {
            "total": lambda stats: stats.host_total,
            "used": lambda stats: stats.host_used,
            "cached": lambda stats: stats.host_cached,
        },
    ),
    *_labelled(
        "paged_state_slots",
        "state",
        {
            "total": lambda stats: stats.state_slots_total,
            "used": lambda stats: stats.state_slots_used,
            "checkpoint": lambda stats: stats.state_checkpoints,
            "free": lambda stats: stats.state_slots_free,
        },
    ),
    *_labelled(
        "paged_host_state_slots",
        "state",
        {"total": lambda stats: stats.host_state_slots_total, "used": lambda stats: stats.host_state_slots_used},
    ),
    Series("paged_sleeping", lambda stats: stats.sleeping),
    Series("paged_disk_tier_up", lambda stats: stats.disk_up),
    Series("paged_disk_blocks", lambda stats: stats.disk_blocks),
    Series("paged_remote_tier_up", lambda stats: stats.remote_up),
    Series("paged_remote_bytes", lambda stats: stats.remote_bytes),
    *_labelled(
        "paged_cache_tier_block_seconds",
        "tier",
        {
            "compute": lambda stats: stats.compute_seconds,
            "host": lambda stats: stats.host_seconds,
            "disk": lambda stats: stats.disk_seconds,
            "remote": lambda stats: stats.remote_seconds,
        },
    ),
    *_labelled(
        "paged_requests", "state", {"running": lambda stats: stats.running, "waiting": lambda stats: stats.waiting}
    ),
    Series("vllm:num_requests_running", lambda stats: stats.running),
    Series("vllm:num_requests_waiting", lambda stats: stats.waiting),
    Series("vllm:kv_cache_usage_perc", lambda stats: stats.usage),
    Series("vllm:gpu_cache_usage_perc", lambda stats: stats.usage),
    *_labelled(
        "nv_trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        {
            "max": lambda stats: stats.blocks_total,
            "used": lambda stats: stats.blocks_used,
            "free": lambda stats: stats.blocks_total - stats.blocks_used,
            "tokens_per": lambda stats: stats.block_size,
            "reused": lambda stats: stats.cached_tokens // stats.block_size,
            "fraction": lambda stats: stats.usage,
        },
    ),
    *_labelled(
        "nv_trt_llm_request_metrics",
        "request_type",
        {
            "active": lambda stats: stats.running,
            "scheduled": lambda stats: stats.running,
            "context": lambda stats: stats.context_requests,
            "waiting": lambda stats: stats.waiting,
        },
    ),
    *_labelled(
        "nv_trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": lambda stats: stats.context_tokens,
            "generation_requests": lambda stats: stats.generation_requests,
            "micro_batch_id": lambda stats: 0,  # there is one batch
            "paused_requests": lambda stats: stats.paused,
        },
    ),
    Series("nv_trt_llm_general_metrics", lambda stats: stats.steps, {"general_type": "iteration_counter"}),
)
COUNTERS = (
    *_labelled(
        "paged_preemptions_total",
        "kind",
        {"recompute": lambda stats: stats.recomputed, "swap": lambda stats: stats.swapped},
    ),
    Series("paged_prefix_cache_hit_tokens_total", lambda stats: stats.cached_tokens),
    Series("paged_host_cache_hit_tokens_total", lambda stats: stats.host_tokens),
    Series("paged_kv_evictions_total", lambda stats: stats.evictions),
    Series("paged_kv_copies_total", lambda stats: stats.copies),
    Series("paged_kernel_compilations_total", lambda stats: stats.compilations),
    *_labelled(
        "paged_kv_swapped_blocks_total",
        "direction",
        {"out": lambda stats: stats.moves_out, "in": lambda stats: stats.moves_in},
    ),
    Series("paged_disk_blocks_read_total", lambda stats: stats.disk_read),
    Series("paged_disk_blocks_written_total", lambda stats: stats.disk_written),
    Series("paged_remote_blocks_read_total", lambda stats: stats.remote_read),
    Series("paged_remote_blocks_written_total", lambda stats: stats.remote_written),
    Series("paged_remote_tier_disabled_total", lambda stats: stats.remote_disabled),
    Series("paged_guessed_tokens_total", lambda stats: stats.draft_tokens),
    Series("paged_accepted_tokens_total", lambda stats: stats.accepted_tokens),
    Series("vllm:num_preemptions_total", lambda stats: stats.preemptions),
    Series("vllm:prefix_cache_hits_total", lambda stats: stats.cached_tokens),
    Series("vllm:prefix_cache_queries_total", lambda stats: stats.queried_tokens),
    Series("vllm:spec_decode_num_draft_tokens_total", lambda stats: stats.draft_tokens),
    Series("vllm:spec_decode_num_accepted_tokens_total", lambda stats: stats.accepted_tokens),
)
