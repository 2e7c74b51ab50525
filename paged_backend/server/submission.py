"""Hands admitted requests to the engine, after their grammars are compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from paged_backend.api.errors import RequestError, internal_error
from paged_backend.api.guide import Guide
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.engine import Engine
from paged_backend.guided.compiler import GrammarCompiler

log = logging.getLogger("paged_llm")


class Submission:
    """Submits requests whose streams are open; a failure ends the stream with an error."""

    def __init__(
        self,
        engine: Engine,
        grammars: GrammarCompiler,
        place: Callable[[GenerateRequest], bool] = lambda request: False,
    ):
        """place: sends an announced request to another engine, and returns whether it did."""
        self._engine = engine
        self._grammars = grammars
        self._place = place

    def submit(self, request: GenerateRequest) -> None:
        """Give an announced request to the engine. Never raises."""
        try:
            if self._place(request):
                return
            if request.sampling.structure is None:
                self._engine.deliver(request)
            else:
                self._compile_and_deliver(request)
        except Exception as error:
            log.exception("request %d: could not be queued", request.key)
            self._engine.reject(request.key, internal_error(error))

    def _compile_and_deliver(self, request: GenerateRequest) -> None:
        """Compile the request's grammar in the background, then deliver. The request can be cancelled meanwhile."""
        key, sampling = request.key, request.sampling
        assert sampling.structure is not None

        def compiled(guides: tuple[Guide, ...] | RequestError) -> None:
            if isinstance(guides, RequestError):
                self._engine.reject(key, guides)
            else:
                self._engine.deliver(replace(request, guides=guides))

        self._engine.emit_stats()
        self._grammars.compile(
            sampling.structure,
            sampling.num_samples,
            compiled,
            tenant=sampling.cache_salt,
            still_wanted=lambda: self._engine.is_pending(key),
        )
