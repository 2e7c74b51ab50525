"""Write the Grafana dashboards in grafana/dashboards.

`python deploy/observe/dashboards.py` writes them; a test fails when they are out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "grafana/dashboards"
COLUMNS, WIDTH, HEIGHT = 2, 12, 8  # panels per row, and the size of a panel; Grafana's grid has 24 columns
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
SERIES = 'model=~"$model",instance=~"$instance"'  # matches the series of the selected models and servers


@dataclass(frozen=True)
class Panel:
    """A graph over time."""

    title: str
    description: str
    unit: str  # Grafana's name of the unit
    queries: Mapping[str, str]  # PromQL by legend; a legend in {{}} is the value of a label
    stacked: bool = False  # whether the series are parts of a whole


@dataclass(frozen=True)
class Dashboard:
    """A page of panels."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def total(metric: str, labels: str = "", by: str = "") -> str:
    """Return the query of a gauge: the sum of all series, or of those with each value of the label `by`."""
    return _sum(_series(metric, labels), by)


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """Return the query of a counter's rate: the sum of all series, or of those with each value of the label `by`."""
    return _sum(f"rate({_series(metric, labels)}[$__rate_interval])", by)


def quantiles(metric: str) -> dict[str, str]:
    """Return the queries of the 50th, 95th and 99th percentile of a histogram."""
    buckets = rate(f"{metric}_bucket", by="le")
    return {f"p{percent}": f"histogram_quantile({percent / 100}, {buckets})" for percent in (50, 95, 99)}


def ratio(numerator: str, denominator: str) -> str:
    """Return the query of a ratio of two rates."""
    return f"{numerator} / {denominator}"


def _sum(query: str, by: str) -> str:
    return f"sum by ({by}) ({query})" if by else f"sum({query})"


def filled_in(query: str, window: str) -> str:
    """Return a query with the values that Grafana puts in, for all models and servers. window: time of a rate."""
    for variable, value in {"$__rate_interval": window, "$model": ".+", "$instance": ".+"}.items():
        query = query.replace(variable, value)
    return query


def _series(metric: str, labels: str) -> str:
    return f"{metric}{{{','.join(filter(None, (SERIES, labels)))}}}"


DASHBOARDS = (
    Dashboard(
        "paged-requests",
        "LLM requests",
        (
            Panel(
                "Requests",
                "Running requests are in the batch. Waiting ones have no room in the batch or in the KV cache.",
                "short",
                {"{{state}}": total("paged_requests", by="state")},
                stacked=True,
            ),
            Panel(
                "Finished requests",
                "By reason. queue_full and tenant_full were rejected because too many requests wait; error is an"
                " internal error.",
                "reqps",
                {"{{reason}}": rate("paged_requests_finished_total", by="reason")},
                stacked=True,
            ),
            Panel(
                "Time to first token",
                "From the arrival of a request to its first token: queue and prefill.",
                "s",
                quantiles("paged_time_to_first_token_seconds"),
            ),
            Panel(
                "Inter-token latency",
                "Between two tokens of a stream, one value per token. A p99 far above the p50 means that prefill or"
                " preemption delays running requests.",
                "s",
                quantiles("paged_inter_token_latency_seconds"),
            ),
            Panel("Queue time", "From arrival to the first step.", "s", quantiles("paged_queue_time_seconds")),
            Panel(
                "Request latency", "From arrival to the last token.", "s", quantiles("paged_request_latency_seconds")
            ),
            Panel(
                "Tokens per second",
                "Prompt tokens of accepted requests, those of them found in the prefix cache, and generated tokens.",
                "short",
                {
                    "prompt": rate("paged_prompt_tokens_total"),
                    "prompt, cached": rate("paged_prefix_cache_hit_tokens_total"),
                    "generated": rate("paged_generation_tokens_total"),
                },
            ),
            Panel(
                "Tokens per request",
                "Median and 95th percentile of the lengths of prompts and outputs.",
                "short",
                {
                    f"{name}, {percent}": quantiles(f"paged_request_{kind}_tokens")[percent]
                    for name, kind in (("prompt", "prompt"), ("output", "generation"))
                    for percent in ("p50", "p95")
                },
            ),
            Panel("Sessions", "Open sessions, whose blocks are pinned.", "short", {"open": total("paged_sessions")}),
            Panel(
                "Restarts",
                "Restarts by paged serve --restart, by reason.",
                "short",
                {"{{reason}}": total("paged_restarts_total", by="reason")},
                stacked=True,
            ),
            Panel(
                "Draft tokens",
                "Share of the draft tokens of speculative decoding that were accepted. No data without speculation.",
                "percentunit",
                {"accepted": ratio(rate("paged_accepted_tokens_total"), rate("paged_guessed_tokens_total"))},
            ),
        ),
    ),
    Dashboard(
        "paged-kv-cache",
        "LLM KV cache",
        (
            Panel(
                "Blocks",
                "used: held by requests. cached: kept for their content until the room is needed. free: empty.",
                "short",
                {"{{state}}": total("paged_kv_blocks", 'state=~"used|cached|free"', by="state")},
                stacked=True,
            ),
            Panel(
                "Shared and pinned blocks",
                "Blocks that several sequences hold, and blocks that sessions hold between turns.",
                "short",
                {"{{state}}": total("paged_kv_blocks", 'state=~"shared|pinned"', by="state")},
            ),
            Panel(
                "Prefix cache hit rate",
                "Share of the looked up tokens that were in the cache, and those of them that were in host memory.",
                "percentunit",
                {
                    "all": ratio(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")),
                    "from host memory": ratio(
                        rate("paged_host_cache_hit_tokens_total"), rate("vllm:prefix_cache_queries_total")
                    ),
                },
            ),
            Panel(
                "Preemptions",
                "Requests that lost their blocks to others. A lasting rate means that the pool is too small.",
                "ops",
                {"{{kind}}": rate("paged_preemptions_total", by="kind")},
                stacked=True,
            ),
            Panel(
                "Evictions and copies",
                "Cached blocks whose content was dropped for other requests, and blocks copied on write.",
                "ops",
                {"evictions": rate("paged_kv_evictions_total"), "copies": rate("paged_kv_copies_total")},
            ),
            Panel(
                "Blocks moved",
                "Blocks copied between device and host memory, and read from and written to disk and the remote store.",
                "ops",
                {
                    "swapped {{direction}}": rate("paged_kv_swapped_blocks_total", by="direction"),
                    "read from disk": rate("paged_disk_blocks_read_total"),
                    "written to disk": rate("paged_disk_blocks_written_total"),
                    "read from the remote store": rate("paged_remote_blocks_read_total"),
                    "written to the remote store": rate("paged_remote_blocks_written_total"),
                },
            ),
            Panel(
                "Host memory",
                "Blocks of the host pool (swap_space): total; used by preempted requests; cached for their content.",
                "short",
                {"{{state}}": total("paged_host_blocks", by="state")},
            ),
            Panel(
                "Disk",
                "Cached blocks on disk (disk_cache_dir).",
                "short",
                {"blocks": total("paged_disk_blocks")},
            ),
            Panel(
                "Cost of a block",
                "Measured time to compute the tokens of a block, or to get it from host memory, disk or the remote"
                " store; the slowest of the selected servers.",
                "s",
                {"{{tier}}": f"max by (tier) ({_series('paged_cache_tier_block_seconds', '')})"},
            ),
        ),
    ),
    Dashboard(
        "paged-device",
        "LLM device",
        (
            Panel(
                "Time per step",
                "launch includes the forward pass on a CPU. wait is the time for which the device is the bottleneck.",
                "s",
                {
                    "{{phase}}": f"{rate('paged_step_seconds_total', by='phase')}"
                    f" / ignoring (phase) group_left () {rate('paged_steps_total')}"
                },
                stacked=True,
            ),
            Panel(
                "Time of the engine's thread",
                "Share of time in each phase. The rest is idle, or goes to messages and outputs.",
                "percentunit",
                {"{{phase}}": rate("paged_step_seconds_total", by="phase")},
                stacked=True,
            ),
            Panel(
                "Steps",
                "By whether a CUDA graph ran the forward pass. On a CPU there are no graphs.",
                "ops",
                {"CUDA graph: {{cuda_graph}}": rate("paged_steps_total", by="cuda_graph")},
                stacked=True,
            ),
            Panel("Batch size", "Sequences computed in a step.", "short", quantiles("paged_batch_size")),
            Panel("Tokens per step", "Of prompts and outputs.", "short", quantiles("paged_step_tokens")),
            Panel(
                "Compilations after ready",
                "GPU kernels that were compiled while requests waited. Must stay 0.",
                "short",
                {"kernels": total("paged_kernel_compilations_total")},
            ),
            Panel(
                "Memory",
                "cpu: the model's process. gpu: tensors on the GPU. pinned: blocks in host memory.",
                "bytes",
                {"{{kind}}": total("paged_memory_bytes", by="kind")},
            ),
        ),
    ),
)


def to_json(dashboard: Dashboard) -> str:
    """Return the dashboard as the JSON that Grafana's provisioning reads."""
    content = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["llm"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(index, panel) for index, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(content, indent=2) + "\n"


def _variables() -> list[dict[str, Any]]:
    """Return the selectors at the top of the page: data source, model and server."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    labels = [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": PROMETHEUS,
            "query": {"query": f"label_values(paged_requests, {name})", "refId": name},
            "refresh": 2,  # whenever the time range changes
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        }
        for name, label in (("model", "Model"), ("instance", "Server"))
    ]
    return [source, *labels]


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 0}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": PROMETHEUS,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": PROMETHEUS, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (DIRECTORY / f"{dashboard.uid}.json").write_text(to_json(dashboard))


if __name__ == "__main__":
    main()
