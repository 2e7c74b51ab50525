"""Encodes long prompts in the background, so that other requests are admitted meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from paged_backend.api.errors import RequestError, internal_error
from paged_backend.api.request import GenerateRequest
from paged_backend.api.trace import recorded
from paged_backend.engine.core import Announcement
from paged_backend.engine.engine import Engine
from paged_backend.server.prompts.encoder import EncodedPrompt, Prompt, PromptEncoder
from paged_backend.server.prompts.encoder_process import PromptProcess
from paged_backend.server.requests.arrival import Arrival, StreamBuilder
from paged_backend.server.streams.responder import Responder
from paged_backend.server.streams.stream import Stream
from paged_backend.text.tokenizing import LONG_CHARS
from paged_backend.utils.worker import BackgroundWorker

log = logging.getLogger("paged_llm")

TOKEN_CHARS = 4  # characters of a token of English text


class LongPrompts:
    """Requests whose long prompts are encoded in the background, one after the other, on two threads: one for prompts
    of up to LONG_CHARS characters, and one for longer ones, which a separate process encodes.

    Their streams are open already: a timeout, a cancellation or a stop_request can end them. A request whose stream has
    ended counts as waiting until the tokenizer has processed it, because its text stays in memory.
    """

    def __init__(
        self,
        admission_lock: threading.Lock,
        prompts: PromptEncoder,
        builder: StreamBuilder,
        engine: Engine,
        responder: Responder,
        submit: Callable[[GenerateRequest], None],
        *,
        seconds: float,
        context: int,
    ):
        """admission_lock: guards `pending`; its holder admits one request at a time.
        submit: gives an announced request to the engine.
        seconds: time limit for a prompt above LONG_CHARS.
        context: `max_model_len`. If such prompts fit into it, their process starts at once."""
        self.pending: list[Stream] = []
        self._admission_lock = admission_lock
        self._prompts = prompts
        self._builder = builder
        self._engine = engine
        self._responder = responder
        self._submit = submit
        self._process = PromptProcess(prompts, seconds)
        self._worker, self._long_worker = BackgroundWorker("prompts"), BackgroundWorker("long prompts")
        if context * TOKEN_CHARS > LONG_CHARS:
            self._long_worker.submit(self._process.start)

    def submit(self, arrival: Arrival) -> None:
        """Open the request's stream and encode its prompt later. The caller holds the admission lock."""
        stream = self._builder.build_untokenized(arrival)
        announcement = self._engine.announce(arrival.key)
        self._responder.open(stream)
        self._engine.emit_stats()
        self.pending.append(stream)
        if arrival.num_chars > LONG_CHARS:
            self._long_worker.submit(self._encode, arrival, announcement, stream, self._process.encode)
        else:
            self._worker.submit(self._encode, arrival, announcement, stream, self._prompts.encode)

    def stop(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in (self._worker, self._long_worker):
            worker.stop(deadline - time.monotonic())
        self._process.stop()

    def _encode(
        self,
        arrival: Arrival,
        announcement: Announcement,
        opened: Stream,
        encode: Callable[[Prompt], EncodedPrompt],
    ) -> None:
        tokenized: Stream | None = None
        error: RequestError | None = None
        try:
            if not opened.ended:
                with recorded(arrival.trace, "tokenize"):
                    prompt = encode(arrival.prompt())
                tokenized = self._builder.build(arrival, prompt)
        except RequestError as failure:
            error = failure.with_traceback(None)  # which has this frame, and would keep the text in memory with it
        except Exception as failure:
            log.exception("a long prompt could not be encoded")
            error = internal_error(failure)
        with self._admission_lock:  # counted before the client gets a response and may send its next request
            self.pending.remove(opened)
        if error:
            self._engine.reject(arrival.key, error)
        elif tokenized:
            self._responder.set_prompt(opened, tokenized)
            self._submit(replace(tokenized.request, announcement=announcement))
