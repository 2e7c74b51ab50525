"""One model instance: creates the engine and everything between it and the server, and starts and stops them.

Triton or a local socket -> Admission -> Engine -> Responder -> Triton or a local socket
"""

from __future__ import annotations

import gc
import logging
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.assembly import assemble
from paged_backend.engine.block_size import resolve_block_size
from paged_backend.engine.engine_service import EngineService
from paged_backend.engine.fingerprint import fingerprint
from paged_backend.engine.router import Router
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.scheduling.stats import Stats
from paged_backend.server.admission import Admission
from paged_backend.server.connections.listener import Listener
from paged_backend.server.connections.migration import Description, Migration, Successors
from paged_backend.server.connections.replicas import Replicas
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.profiler import Profiler
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.streams.responder import Inbox, Responder
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.wire.channel import Channel, ServerChannel
from paged_backend.utils import restarts

log = logging.getLogger("paged_llm")

DRAIN_SHARE = 0.7  # share of stop_timeout for open requests of other models; the rest is for stopping the engine


class Service:
    """One model instance. `submit` never raises: errors of a request are sent to its client."""

    def __init__(
        self,
        config: EngineConfig,
        pb_utils: Any,
        labels: dict[str, str],
        listing: Path | None = None,
        *,
        instance: str | None = None,
        is_replica: bool = False,
    ):
        """Load the model and start serving.

        pb_utils: the module that Triton gives its Python models.
        labels: labels of every metric; `model` also names the local socket.
        listing: the file that lists LoRA adapters.
        instance: Triton's name of this instance. If Triton loads the model again, open requests move to the new
            instance of this name. None: requests are not moved.
        is_replica: whether it runs only requests that another process sends over the local socket.
        """
        self._pb_utils = pb_utils
        self._stall_timeout, self._stop_timeout = config.stall_timeout, config.stop_timeout
        # Before the model is loaded: an error of these options should not take minutes.
        endpoint, ratio = config.otlp_traces_endpoint, config.trace_sample_ratio
        self._tracing = Tracing(endpoint, model=labels["model"], sample_ratio=ratio) if endpoint else None
        self._listener: Listener | None = None
        self._migration: Migration | None = None
        config = resolve_block_size(config)
        # Before the model is loaded here, so that all load it at the same time.
        self._replicas = Replicas(config, labels, listing) if config.data_parallel_size > 1 else None
        try:
            self._load(config, labels, listing)
            self._responder.start()
            self._engine.start()
            self._listen(config, labels, instance, is_replica)
        except BaseException:
            if self._replicas:
                self._replicas.stop()
            raise
        # Objects from loading live as long as the process, so exclude them from garbage collection.
        gc.collect()
        gc.freeze()

    def _load(self, config: EngineConfig, labels: dict[str, str], listing: Path | None) -> None:
        """Load the model, and create everything that answers requests."""
        self._assembly = assembly = assemble(config, listing)
        limits, loaded, replicas = assembly.limits, assembly.loaded, self._replicas
        inbox: Inbox = SimpleQueue()
        self._engine_service = EngineService(limits, loaded.tokenizer, inbox.put)
        self._engine = assembly.engine(self._engine_service.emit)
        self._router = Router(self._engine)
        metrics = Metrics(
            self._pb_utils,
            labels,
            max_model_len=limits.max_model_len,
            memory=assembly.memory,
            add_stats=replicas.add_stats if replicas else lambda stats: stats,
            enabled=not config.disable_log_stats,
        )
        sessions = Sessions(
            config.session_ttl,
            config.max_sessions,
            self._engine.unpin,
            max_mib=config.max_sessions_mib,
            max_per_tenant=config.max_tenant_sessions,
        )
        self._grammars = GrammarCompiler(
            loaded.tokenizer,
            limits.vocab_size,
            loaded.spec.eos_ids,
            seconds=config.structured_outputs_timeout,
            any_whitespace=not config.disable_any_whitespace,
            input_limits=limits.input_limits,
        )
        self._responder = Responder(
            self._router,
            metrics,
            sessions,
            inbox=inbox,
            first_response=None if config.first_response_ms < 0 else config.first_response_ms / 1e3,
            max_response_mib=config.max_response_mib,
            stall_seconds=config.stall_timeout,
            max_model_len=limits.max_model_len,
            tracing=self._tracing,
        )
        self._admission = Admission(
            config,
            assembly,
            self._router,
            self._responder,
            sessions,
            self._grammars,
            problem=self._problem,
            tracing=self._tracing,
            replicas=replicas,
        )
        if replicas:
            replicas.connect(self._router, self._responder.emit)
        metrics.set("max_requests", limits.max_num_seqs, "max")
        for reason, count in restarts.read().items():
            metrics.count("restarts", count, reason)
        metrics.record(self._engine.stats)
        metrics.update()

    def _listen(self, config: EngineConfig, labels: dict[str, str], instance: str | None, is_replica: bool) -> None:
        """Open the socket for the models of trtllm/ and for other instances; without it the model still serves its own
        clients."""
        limits, model, description = self._assembly.limits, labels["model"], None
        if instance is not None or is_replica:
            self._engine_service.start(self._engine, partial(self._admission.submit, here=True), self._check)
        if instance is not None:
            digest = fingerprint(config, self._assembly.loaded, limits)
            description = Description(f"{labels.get('version')}/{instance}", time.monotonic_ns(), digest)
        try:
            self._listener = Listener(
                model,
                self.handle,
                limits.input_limits,
                record_profile=Profiler(self._responder).record,
                sleep_mode=None if self._replicas else self._engine.sleep_mode,
                engine_service=self._engine_service,
                description=description.write() if description else None,
            )
        except OSError as error:
            log.warning("models in front of this one (trtllm/) cannot connect to it: %s", error)
            return
        if description:
            successors = Successors(model, self._listener.name, description)
            max_frame_bytes = limits.input_limits.max_frame_bytes
            self._migration = Migration(
                successors, self._router, self._engine_service, self._responder, max_frame_bytes
            )

    @property
    def socket_name(self) -> str | None:
        """The name of the local socket; None if it could not be opened."""
        return self._listener.name if self._listener else None

    @property
    def stats(self) -> Stats:
        """The statistics of the engine, before it has run a request."""
        return self._engine.stats

    @property
    def ready(self) -> bool:
        """Whether requests will be answered: the model is awake, and the engine's and the responder's threads live and
        make progress."""
        return self._problem() is None and self._engine.sleep_mode.problem is None

    def _problem(self) -> str | None:
        """Return why requests cannot be answered; None if they can."""
        if not (self._engine.alive and self._responder.alive):
            return "the engine has stopped; reload the model"
        for action, seconds in (
            ("a step", self._engine.busy_seconds),
            ("sending responses", self._responder.busy_seconds),
        ):
            if seconds > self._stall_timeout:
                return f"{action} has taken {seconds:.0f} s, more than stall_timeout={self._stall_timeout}"
        return self._replicas.problem() if self._replicas else None

    def submit(self, pb_request: Any) -> None:
        """Handle one request of the server. Returns once it is queued or rejected."""
        try:
            channel = ServerChannel(self._pb_utils, pb_request)
        except Exception:
            log.exception("could not get a response sender")
            return
        self.handle(channel)

    def handle(self, channel: Channel) -> None:
        """Handle one request of the server or of the local socket. May be called from any thread."""
        self._admission.admit(channel)

    def stop(self) -> None:
        """Stop all threads within stop_timeout; later if requests of other models continue in a newer instance, because
        their responses go through this one.

        The server calls this once its own requests have ended, and waits for it; nothing can be sent to it any more.
        """
        drained = 0.0
        if self._listener:
            migration, began = self._migration, time.monotonic()
            if migration:
                migration.begin_unload()
            seconds = DRAIN_SHARE * self._stop_timeout
            self._listener.drain(seconds, lambda: migration is not None and migration.has_successor)
            self._listener.close()
            drained = min(time.monotonic() - began, seconds)
        deadline = time.monotonic() + self._stop_timeout - drained

        def remaining() -> float:
            return max(0.0, deadline - time.monotonic())

        if self._migration:
            self._migration.stop()
        self._grammars.stop()
        self._engine.stop(remaining())
        self._responder.stop(remaining())
        self._admission.stop(remaining())
        if self._tracing:
            self._tracing.stop()
        if self._replicas:
            self._replicas.stop()
        self._assembly.close()

    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestError if a request of another instance cannot run."""
        self._engine.sleep_mode.check()
        if request.sampling.lora_name is not None:
            self._admission.check_adapter(request.sampling.lora_name)
