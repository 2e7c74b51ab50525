"""Prefill servers: compute long prompts before the servers of the requests get them (prefill/decode disaggregation).

A request with a long prompt is first sent to a prefill server, with `prefill_only`. That server writes the blocks of
the prompt to the remote cache, where the server of the request finds them. If no prefill server answers, the server of
the request computes the prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paged_client.openai.concurrency import gather_or_cancel
from paged_client.openai.engine_calls import with_ids
from paged_client.openai.metrics import Metrics
from paged_client.openai.routing import LEAST_LOADED
from paged_client.openai.servers import Servers
from paged_client.openai.translation import EngineRequest
from paged_client.types import PagedError
from paged_client.wire import TRACE_CONTEXT

# Parameters that the tokens of the prompt and the blocks depend on, or that say when the request is served.
_PROMPT_PARAMETERS = (
    "add_special_tokens", "cache_salt", "chat_template_kwargs", "priority", "timeout_ms", "tools", *TRACE_CONTEXT
)  # fmt: skip
# Parameters of requests that are not sent to a prefill server: their prompts are computed anyway, or may differ there.
_EXCLUDED = ("lora_name", "prompt_logprobs", "truncate_prompt_tokens")


@dataclass(frozen=True)
class PrefillSettings:
    """The settings of prefill servers.

    Args:
        urls: their gRPC endpoints.
        min_tokens: estimated number of tokens from which on a prompt is computed there.
        seconds: time limit of a prompt.
        log: called with a line when prompts cannot be computed there any more.
    """

    urls: Sequence[str]
    min_tokens: int
    seconds: float
    log: Callable[[str], object]


class PrefillServers:
    """Computes prompts before the servers of their requests get them. An asynchronous context manager.

    Args:
        settings: the servers, and which prompts to compute.
        model: name of the model there.
        is_model_fixed: whether the user has chosen the name; if not, it follows the name of a restarted server.
        metrics: counts the prompts.

    Raises ValueError for an invalid URL.
    """

    def __init__(self, settings: PrefillSettings, model: str, *, is_model_fixed: bool, metrics: Metrics) -> None:
        self._servers = Servers(settings.urls, model, is_fixed=is_model_fixed, routing=LEAST_LOADED)
        self._settings = settings
        self._metrics = metrics
        self._has_failed = False  # whether the last prompt could not be computed or stored

    async def __aenter__(self) -> None:
        await self._servers.__aenter__()

    async def __aexit__(self, *reason: object) -> None:
        await self._servers.__aexit__(*reason)

    async def compute(self, requests: Sequence[EngineRequest], request_id: str) -> list[EngineRequest]:
        """Compute the long prompts of requests, all at once, and return the requests with the rest of their time
        limits. Never raises an error of a server."""
        return await gather_or_cancel(
            self._compute(request, engine_id) for request, engine_id in with_ids(requests, request_id)
        )

    async def _compute(self, request: EngineRequest, engine_id: str) -> EngineRequest:
        if request.num_new_tokens < self._settings.min_tokens or any(name in request.sampling for name in _EXCLUDED):
            return request
        began, problem = time.monotonic(), await self._problem_of(request, engine_id)
        self._metrics.count_prefill("failed" if problem else "stored")
        if problem and not self._has_failed:
            self._settings.log(
                f"warning: {problem}; prompts are computed by the servers of the requests until this has changed"
            )
        self._has_failed = problem is not None
        if (limit := request.sampling.get("timeout_ms")) is None:
            return request
        left = max(1, limit - round(1e3 * (time.monotonic() - began)))
        return replace(request, sampling=request.sampling | {"timeout_ms": left})

    async def _problem_of(self, request: EngineRequest, engine_id: str) -> str | None:
        """Compute a prompt. Return why it is not stored; None if its full blocks are."""
        sampling = {name: request.sampling[name] for name in _PROMPT_PARAMETERS if name in request.sampling}
        names, seconds = self._servers.names, self._settings.seconds
        work = self._servers.generate(
            request_id=engine_id, prompt=request.prompt, messages=request.messages, prefill_only=True, **sampling
        )
        try:
            completion = await asyncio.wait_for(work, seconds)
        except asyncio.TimeoutError:
            return f"no prefill server has computed a prompt within {seconds:g} s (--prefill-timeout)"
        except (PagedError, ValueError) as error:
            if isinstance(error, PagedError) and (error.code or "").upper() == "NOT_FOUND":
                await self._servers.find_names(names)
            return f"prefill servers: {error}"
        if (completion.receipt or {}).get("stored_tokens"):
            return None
        return (
            f"prefill servers: no block of a prompt is in the remote cache (it ended with {completion.finish_reason})"
        )
