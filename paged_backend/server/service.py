"""One model instance: creates the engine and everything between it and the server, and starts and stops them.

Triton or a local socket -> Admission -> Engine -> Responder -> Triton or a local socket
"""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import LORA_NOT_ENABLED, ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.assembly import assemble
from paged_backend.engine.engine_service import EngineService
from paged_backend.engine.fingerprint import fingerprint
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.connections.listener import Listener
from paged_backend.server.connections.migration import Description, Migration, Successors
from paged_backend.server.connections.replicas import Replicas
from paged_backend.server.health import Health
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.profiler import Profiler
from paged_backend.server.prompts.sessions import Sessions
from paged_backend.server.requests.admission import Admission
from paged_backend.server.responder import Inbox, Responder
from paged_backend.server.streams.tracing import Tracing
from paged_backend.server.submission import Submission
from paged_backend.server.tenants import Tenants
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
    ):
        """Load the model and start serving.

        pb_utils: the module that Triton gives its Python models.
        labels: labels of every metric; `model` also names the local socket.
        listing: the file that lists LoRA adapters.
        instance: Triton's name of this instance. If Triton loads the model again, open requests move to the new
            instance of this name. None: requests are not moved.
        """
        self._pb_utils = pb_utils
        self._stop_timeout = config.stop_timeout
        # Before the model is loaded: an error of these options should not take minutes.
        self._tracing = Tracing(
            config.otlp_traces_endpoint, model=labels["model"], sample_ratio=config.trace_sample_ratio
        )
        # Before the model is loaded here, so that all load it at the same time.
        self._replicas = Replicas(config, labels, listing)
        try:
            self._start(config, labels, listing, instance)
        except BaseException:
            self._replicas.stop()
            raise

    def _start(self, config: EngineConfig, labels: dict[str, str], listing: Path | None, instance: str | None) -> None:
        """Load the model, and start the threads."""
        replicas, pb_utils = self._replicas, self._pb_utils
        self._assembly = assembly = assemble(config, listing)
        limits, loaded = assembly.limits, assembly.loaded
        metrics = Metrics(
            pb_utils,
            labels,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            memory=assembly.memory,
            restarts=restarts.read(),
            enabled=not config.disable_log_stats,
        )
        self._grammars = GrammarCompiler(
            loaded.tokenizer,
            limits.vocab_size,
            loaded.spec.eos_ids,
            seconds=config.structured_outputs_timeout,
            any_whitespace=not config.disable_any_whitespace,
            input_limits=limits.input_limits,
        )
        inbox: Inbox = SimpleQueue()
        self._profiler = Profiler(inbox.put)
        self._engine_service = EngineService(limits, loaded.tokenizer, self._profiler.emit)
        self._engine = assembly.engine(self._engine_service.emit)
        self._tenants = Tenants(config.max_tenant_requests)
        sessions = Sessions(
            config.session_ttl,
            config.max_sessions,
            self._engine.unpin,
            max_mib=config.max_sessions_mib,
            max_per_tenant=config.max_tenant_sessions,
        )
        self._responder = Responder(
            self._engine,
            metrics,
            sessions,
            self._tenants,
            inbox=inbox,
            first_response=None if config.first_response_ms < 0 else config.first_response_ms / 1e3,
            max_response_mib=config.max_response_mib,
            stall_seconds=config.stall_timeout,
            max_model_len=limits.max_model_len,
            tracing=self._tracing,
            add_stats=replicas.add_stats,
        )
        self._health = Health(self._engine, self._responder, config.stall_timeout, replicas.problem)
        self._admission = Admission(
            config,
            assembly,
            self._engine,
            self._responder,
            sessions=sessions,
            tenants=self._tenants,
            grammars=self._grammars,
            health=self._health,
            tracing=self._tracing,
            replicas=replicas,
        )
        self._migration = Migration(
            self._engine.moved_requests,
            self._engine_service,
            self._responder.emit,
            self._responder.count_moved,
            limits.input_limits.max_frame_bytes,
        )
        replicas.connect(self._engine, self._responder.emit)
        metrics.update(replicas.add_stats(assembly.scheduler.stats))
        self._responder.start()
        self._engine.start()
        description = None
        if instance is not None:
            submission = Submission(self._engine, self._grammars)
            moved = self._engine.moved_requests
            announce = moved.announce
            self._engine_service.start(self._engine, announce, submission.submit, self._check, moved.store)
            name = f"{labels.get('version')}/{instance}"
            description = Description(name, time.monotonic_ns(), fingerprint(config, loaded, limits))
        self._listener = self._listen(labels["model"], description)
        if self._listener and description:
            self._migration.start(Successors(labels["model"], self._listener.name, description))
        # Objects from loading live as long as the process, so exclude them from garbage collection.
        gc.collect()
        gc.freeze()

    @property
    def socket_name(self) -> str | None:
        """The name of the local socket; None if it could not be opened."""
        return self._listener.name if self._listener else None

    @property
    def stats(self) -> SchedulerStats:
        """The statistics of the engine, before it has run a request."""
        return self._assembly.scheduler.stats

    @property
    def ready(self) -> bool:
        """Whether requests will be answered: the model is awake, and the engine's and the responder's threads live and
        make progress."""
        return self._health.problem() is None and self._engine.sleep_mode.problem is None

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
        if self._listener:
            self._migration.begin_unload()
            began = time.monotonic()
            self._listener.drain(DRAIN_SHARE * self._stop_timeout, lambda: self._migration.has_successor)
            self._listener.close()
            drained = min(time.monotonic() - began, DRAIN_SHARE * self._stop_timeout)
        else:
            drained = 0.0
        deadline = time.monotonic() + self._stop_timeout - drained

        def remaining() -> float:
            return max(0.0, deadline - time.monotonic())

        self._migration.stop()
        self._grammars.stop()
        self._engine.stop(remaining())
        self._responder.stop(remaining())
        self._admission.stop(remaining())
        self._tracing.stop()
        self._replicas.stop()
        self._assembly.close()

    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestError if a request of another instance cannot run."""
        self._engine.sleep_mode.check()
        if (name := request.sampling.lora_name) is not None:
            if self._assembly.adapters is None:
                raise RequestError(ErrorCode.INVALID_ARGUMENT, LORA_NOT_ENABLED)
            self._assembly.adapters.check(name)

    def _listen(self, model: str, description: Description | None) -> Listener | None:
        """Open the socket for the models of trtllm/; without it the model still serves its own clients."""
        try:
            return Listener(
                model,
                self.handle,
                self._assembly.limits.input_limits,
                record_profile=self._profiler.record,
                sleep_mode=None if self._replicas.count > 1 else self._engine.sleep_mode,
                engine_service=self._engine_service,
                description=description.write() if description else None,
            )
        except OSError as error:
            log.warning("models in front of this one (trtllm/) cannot connect to it: %s", error)
            return None
