"""Gauges and counters that show the scheduler's statistics. Their descriptions are in metric_definitions.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.metric_definitions import NO_LABELS


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
