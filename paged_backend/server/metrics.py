"""Prometheus metrics, served by Triton at /metrics.

Each update is a round trip to the server process, so they are made on the responder's thread only, and gauges only
where they changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.utils.machine import MemoryUsage

log = logging.getLogger("paged_llm")

OUTCOMES = ("stop", "length", "timeout", "cancelled", "error", "refused", "queue_full", "tenant_full")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# Those of vLLM, of which dashboards take quantiles.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_SAMPLES = (1, 2, 5, 10, 20)
_TRT_TOKENS = (10, 50, 100, 500, 1000)
MEMORY_SECONDS = 1.0  # between two looks at what the process holds


def token_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 … up to `longest`, as vLLM counts tokens."""
    bounds = (factor * 10**power for power in range(len(str(longest))) for factor in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= longest)


class Gauge(NamedTuple):
    name: str
    help: str
    value: Callable[[SchedulerStats], float]
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


class Histogram(NamedTuple):
    name: str
    help: str
    buckets: tuple[float, ...] | None  # None: of tokens
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


class Counter(NamedTuple):
    field: str
    name: str
    help: str
    labels: dict[str, str] = {}  # noqa: RUF012  never changed


def _blocks(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_kv_blocks", "Blocks of the key/value pool, by state", value, {"state": state})


def _host_blocks(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_host_blocks", "Blocks of the host's pool, by state", value, {"state": state})


def _requests(state: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("paged_requests", "Requests in the engine, by state", value, {"state": state})


def _trt_blocks(kind: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    name = "nv_trt_llm_kv_cache_block_metrics"
    return Gauge(name, "KV cache block metrics, as TensorRT-LLM names them", value, {"kv_cache_block_type": kind})


TRT_GENERAL = "Steps, and when the last of them was told of, as TensorRT-LLM names them"


def _trt_requests(kind: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    return Gauge("nv_trt_llm_request_metrics", "Requests, as TensorRT-LLM counts them", value, {"request_type": kind})


def _trt_batch(kind: str, value: Callable[[SchedulerStats], float]) -> Gauge:
    name = "nv_trt_llm_inflight_batcher_metrics"
    return Gauge(name, "The last step, as TensorRT-LLM tells it", value, {"inflight_batcher_specific_metric": kind})


GAUGES = (
    _blocks("total", lambda stats: stats.blocks_total),
    _blocks("used", lambda stats: stats.blocks_used),
    _blocks("free", lambda stats: stats.blocks_free),
    _blocks("cached", lambda stats: stats.blocks_cached),
    _blocks("shared", lambda stats: stats.blocks_shared),
    _blocks("pinned", lambda stats: stats.blocks_pinned),
    _host_blocks("total", lambda stats: stats.host_total),
    _host_blocks("used", lambda stats: stats.host_used),
    _host_blocks("cached", lambda stats: stats.host_cached),
    Gauge("paged_disk_tier_up", "1 while cached blocks are kept on disk", lambda stats: stats.disk_up),
    Gauge("paged_disk_blocks", "Blocks on disk", lambda stats: stats.disk_blocks),
    _requests("running", lambda stats: stats.running),
    _requests("waiting", lambda stats: stats.waiting),
    # The names that dashboards of other backends read.
    Gauge("vllm:num_requests_running", "Requests that compute", lambda stats: stats.running),
    Gauge("vllm:num_requests_waiting", "Requests that wait", lambda stats: stats.waiting),
    Gauge("vllm:kv_cache_usage_perc", "Share of the pool in use, 0 to 1", lambda stats: stats.usage),
    Gauge("vllm:gpu_cache_usage_perc", "The same, as earlier versions name it", lambda stats: stats.usage),
    _trt_blocks("max", lambda stats: stats.blocks_total),
    _trt_blocks("used", lambda stats: stats.blocks_used),
    _trt_blocks("free", lambda stats: stats.blocks_total - stats.blocks_used),
    _trt_blocks("tokens_per", lambda stats: stats.block_size),
    _trt_blocks("reused", lambda stats: stats.cached_tokens // stats.block_size),
    _trt_blocks("fraction", lambda stats: stats.usage),
    _trt_requests("active", lambda stats: stats.running),
    _trt_requests("scheduled", lambda stats: stats.running),
    _trt_requests("context", lambda stats: stats.context_requests),
    _trt_requests("waiting", lambda stats: stats.waiting),
    _trt_batch("total_context_tokens", lambda stats: stats.context_tokens),
    _trt_batch("generation_requests", lambda stats: stats.generation_requests),
    _trt_batch("micro_batch_id", lambda _: 0),  # there is one batch
    _trt_batch("paused_requests", lambda stats: stats.paused),
    Gauge("nv_trt_llm_general_metrics", TRT_GENERAL, lambda stats: stats.steps, {"general_type": "iteration_counter"}),
)
COUNTERS = (  # by the field of SchedulerStats
    Counter("recomputed", "paged_preemptions_total", "Requests sent back to the queue, by kind", {"kind": "recompute"}),
    Counter("swapped", "paged_preemptions_total", "Requests sent back to the queue, by kind", {"kind": "swap"}),
    Counter("cached_tokens", "paged_prefix_cache_hit_tokens_total", "Prompt tokens found in the cache"),
    Counter("host_tokens", "paged_host_cache_hit_tokens_total", "Of those, tokens that came from the host"),
    Counter("evictions", "paged_kv_evictions_total", "Cached blocks whose content made way"),
    Counter("copies", "paged_kv_copies_total", "Blocks copied on write"),
    Counter("moves_out", "paged_kv_swapped_blocks_total", "Blocks moved between device and host", {"direction": "out"}),
    Counter("moves_in", "paged_kv_swapped_blocks_total", "Blocks moved between device and host", {"direction": "in"}),
    Counter("disk_read", "paged_disk_blocks_read_total", "Blocks that came from disk"),
    Counter("disk_written", "paged_disk_blocks_written_total", "Blocks that went to disk"),
    Counter("draft_tokens", "paged_guessed_tokens_total", "Guesses of tokens that were checked"),
    Counter("accepted_tokens", "paged_accepted_tokens_total", "Of those, the right ones"),
    # The names that dashboards of other backends read.
    Counter("preemptions", "vllm:num_preemptions_total", "Requests sent back to the queue"),
    Counter("cached_tokens", "vllm:prefix_cache_hits_total", "Tokens found in the cache"),
    Counter("queried_tokens", "vllm:prefix_cache_queries_total", "Tokens looked for in the cache"),
    Counter("draft_tokens", "vllm:spec_decode_num_draft_tokens_total", "Guesses that were checked"),
    Counter("accepted_tokens", "vllm:spec_decode_num_accepted_tokens_total", "Guesses that were right"),
)
# What is counted by the responder, each with the name that dashboards of vLLM's read.
PROMPT_TOKENS = ("paged_prompt_tokens_total", "vllm:prompt_tokens_total")
GENERATED_TOKENS = ("paged_generation_tokens_total", "vllm:generation_tokens_total")
FIRST_TOKEN = (
    Histogram("paged_time_to_first_token_seconds", "Arrival to first token", _SECONDS),
    Histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN),
)
PER_TOKEN = tuple(
    Histogram(name, "Mean time between a request's tokens after the first", buckets)
    for name, buckets in (
        ("paged_time_per_output_token_seconds", _SECONDS),
        ("vllm:time_per_output_token_seconds", _PER_TOKEN),
    )
)
LATENCY = (
    Histogram("paged_request_latency_seconds", "Arrival to last token", _SECONDS),
    Histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY),
)
REQUEST_PROMPT = (
    Histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt", None),
    Histogram(
        "nv_llm_input_token_len", "Tokens of a prompt", _TRT_TOKENS, {"response_metric_type": "total_input_tokens"}
    ),
)
REQUEST_GENERATED = (
    Histogram("vllm:request_generation_tokens", "Tokens that a request generated", None),
    Histogram(
        "nv_llm_output_token_len", "Tokens generated", _TRT_TOKENS, {"response_metric_type": "total_output_tokens"}
    ),
)
REQUEST_N = (Histogram("vllm:request_params_n", "Samples that a request asked for", _SAMPLES),)


class Metric:
    """A value under some of the server's names, or none. Their trouble stays here: the thread that updates them has
    answers to send."""

    def __init__(self, metrics: Iterable[Any]):
        self._metrics = tuple(metrics)

    def set(self, value: float) -> None:
        self._update("set", value)

    def increment(self, value: float) -> None:
        self._update("increment", value)

    def observe(self, value: float) -> None:
        self._update("observe", value)

    def _update(self, how: str, value: float) -> None:
        for metric in self._metrics:
            try:
                getattr(metric, how)(value)
            except Exception:
                log.exception("a metric could not be updated")


class Metrics:
    """The metrics of one model instance. `pb_utils` is the module that the server gives its Python models. Where they
    are not `enabled`, or the server has none, updates do nothing."""

    def __init__(
        self,
        pb_utils: Any,
        labels: dict[str, str],
        *,
        max_model_len: int = 1,
        max_num_seqs: int = 1,
        memory: Callable[[], MemoryUsage] = lambda: MemoryUsage(0, 0, 0),
        enabled: bool = True,
    ):
        self._pb_utils = pb_utils
        self._labels = labels
        self._families: dict[str, Any] = {}  # a family must outlive its metrics
        self._enabled = enabled and self._served()
        self._tokens = token_buckets(max_model_len)
        self._gauges = [self._metric(gauge.name, "GAUGE", gauge.help, gauge.labels) for gauge in GAUGES]
        self._shown: list[float | None] = [None] * len(GAUGES)
        when = ("nv_trt_llm_general_metrics", "GAUGE", TRT_GENERAL, {"general_type": "timestamp"})
        self._when, self._stepped = self._metric(*when), -1
        held = ("nv_trt_llm_runtime_memory_metrics", "GAUGE", "Bytes in use, as TensorRT-LLM names them")
        self._held = [self._metric(*held, {"memory_type": kind}) for kind in MemoryUsage._fields]
        self._memory, self._next_memory = memory, 0.0
        self._counters = [self._metric(one.name, "COUNTER", one.help, one.labels) for one in COUNTERS]
        self._counted = [0] * len(COUNTERS)
        ended = ("paged_requests_finished_total", "COUNTER", "Requests ended, by reason")
        self._ended = {reason: self._metric(*ended, {"reason": reason}) for reason in OUTCOMES}
        self._due: dict[Metric, float] = {}  # what was counted, and the server has not been told
        self._sessions = self._metric("paged_sessions", "GAUGE", "Sessions that are open")
        self._shown_sessions = -1
        most = _trt_requests("max", lambda _: max_num_seqs)
        self._metric(most.name, "GAUGE", most.help, most.labels).set(max_num_seqs)
        self.prompt_tokens = self._sum(PROMPT_TOKENS, "Prompt tokens of accepted requests")
        self.generated_tokens = self._sum(GENERATED_TOKENS, "Tokens generated")
        self.time_to_first_token = self._histograms(FIRST_TOKEN)
        self.time_per_output_token = self._histograms(PER_TOKEN)
        self.latency = self._histograms(LATENCY)
        self.request_prompt = self._histograms(REQUEST_PROMPT)
        self.request_generated = self._histograms(REQUEST_GENERATED)
        self.request_n = self._histograms(REQUEST_N)

    def show(self, stats: SchedulerStats) -> None:
        """Bring gauges and counters up to date, those that changed."""
        for index, gauge in enumerate(GAUGES):
            value = gauge.value(stats)
            if value != self._shown[index]:
                self._gauges[index].set(value)
                self._shown[index] = value
        for index, counter in enumerate(COUNTERS):
            now = getattr(stats, counter.field)
            if now > self._counted[index]:
                self._counters[index].increment(now - self._counted[index])
                self._counted[index] = now
        if stats.steps != self._stepped:
            self._when.set(int(time.time()))
            self._stepped = stats.steps
        if self._enabled and time.monotonic() >= self._next_memory:
            self._next_memory = time.monotonic() + MEMORY_SECONDS
            self._show_memory()

    def _show_memory(self) -> None:
        try:
            held = self._memory()
        except Exception:
            log.exception("what memory is in use could not be found out")
            return
        for metric, value in zip(self._held, held, strict=True):
            metric.set(value)

    def set_session_count(self, count: int) -> None:
        if count != self._shown_sessions:
            self._sessions.set(count)
            self._shown_sessions = count

    def accepted(self, prompt_tokens: int) -> None:
        """This and the two below count one request, or its tokens; `flush` tells the server of all at once."""
        self._count(self.prompt_tokens, prompt_tokens)

    def generated(self, tokens: int) -> None:
        self._count(self.generated_tokens, tokens)

    def ended(self, reason: str) -> None:
        self._count(self._ended[reason], 1)

    @property
    def has_pending(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._due)

    def flush(self) -> None:
        due, self._due = self._due, {}
        for metric, count in due.items():
            metric.increment(count)

    def _count(self, metric: Metric, count: float) -> None:
        self._due[metric] = self._due.get(metric, 0) + count

    def answered(self, *, prompt: int, generated: int, n: int, seconds: float) -> None:
        """Book what a request took that has had tokens: of its prompt, of all its samples, and since it arrived."""
        self.latency.observe(seconds)
        self.request_prompt.observe(prompt)
        self.request_generated.observe(generated)
        self.request_n.observe(n)

    def _served(self) -> bool:
        """Whether the server has metrics: it may be started without."""
        try:
            self._family("paged_sessions", "GAUGE", "Sessions that are open")
        except Exception as error:
            log.info("no metrics: %s", error)
            return False
        return True

    def _family(self, name: str, kind: str, help: str) -> Any:
        if name not in self._families:
            families = self._pb_utils.MetricFamily
            self._families[name] = families(name=name, description=help, kind=getattr(families, kind))
        return self._families[name]

    def _metric(self, name: str, kind: str, help: str, labels: Mapping[str, str] = {}) -> Metric:
        if not self._enabled:
            return Metric(())
        return Metric([self._family(name, kind, help).Metric(labels=self._labels | dict(labels))])

    def _sum(self, names: Iterable[str], help: str) -> Metric:
        return Metric(
            self._family(name, "COUNTER", help).Metric(labels=self._labels) for name in names if self._enabled
        )

    def _histograms(self, kinds: Iterable[Histogram]) -> Metric:
        return Metric(
            self._family(one.name, "HISTOGRAM", one.help).Metric(
                labels=self._labels | one.labels, buckets=list(one.buckets or self._tokens)
            )
            for one in kinds
            if self._enabled
        )
