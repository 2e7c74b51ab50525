"""Prepares requests for the scheduler: loads their LoRA adapters and reads cached prefixes from the tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from paged_backend.api.errors import CannotContinue, ErrorCode, RequestError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.messages import AddRequest, EmitStats, Message, StorePrefetched
from paged_backend.engine.prefix_tiers import PrefetchedBlocks, PrefixTiers
from paged_backend.loading.adapters import AdapterRegistry

log = logging.getLogger("paged_llm")


class RequestPreparation:
    """Loads adapters and prefetches prefixes, each on a separate thread, then posts the request to the inbox."""

    def __init__(
        self,
        post: Callable[[Message], None],
        reject: Callable[[int, RequestError], None],
        adapters: AdapterRegistry | None,
        prefix_tiers: PrefixTiers | None,
    ):
        """post: posts a message to the engine's inbox. reject: ends an announced request with an error."""
        self._post = post
        self._reject = reject
        self._adapters = adapters
        self._prefix_tiers = prefix_tiers

    def deliver(self, request: GenerateRequest) -> None:
        """Post the request once its adapter is loaded and its prefix is read. Does not block."""
        if self._adapters and request.sampling.lora_name is not None:
            self._post(EmitStats())
            self._adapters.run(self._load_adapter, request)
        else:
            self._prefetch_or_post(request)

    def _load_adapter(self, request: GenerateRequest) -> None:
        """Load the request's adapter. Runs on the adapters' thread."""
        assert self._adapters and request.sampling.lora_name is not None
        try:
            adapter = self._adapters.get(request.sampling.lora_name)
            if request.progress and request.progress.adapter != adapter.digest:
                raise CannotContinue(f"lora_name={request.sampling.lora_name!r}: the adapter's files have changed")
            request = replace(request, adapter=adapter)
        except RequestError as error:
            self._reject(request.key, error)
        except Exception as error:
            log.exception("request %d: could not load its adapter", request.key)
            reason = f"its adapter could not be loaded: {type(error).__name__}: {error}"
            self._reject(request.key, RequestError(ErrorCode.INTERNAL, reason))
        else:
            self._prefetch_or_post(request)

    def _prefetch_or_post(self, request: GenerateRequest) -> None:
        if self._prefix_tiers and self._prefix_tiers.can_prefetch(request):
            self._post(EmitStats())
            self._prefix_tiers.prefetch(request, self._post_prefetched, self._post_request)
        else:
            self._post_request(request)

    def _post_prefetched(self, prefetched: PrefetchedBlocks) -> None:
        self._post(StorePrefetched(prefetched))

    def _post_request(self, request: GenerateRequest) -> None:
        self._post(AddRequest(request))
