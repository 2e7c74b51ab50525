"""The server behind the gateway."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from paged_client.async_client import AsyncClient
from paged_client.async_retry import RetryingTransport
from paged_client.discovery import find_model
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import PagedError

# Texts of errors of another class than UNAVAILABLE that pass when the server is restarted. They are the engine's, and
# tritonserver's, whose process for the engine has ended or hangs.
_RESTART_TEXTS = ("the engine died", "is not healthy")
OUTPUT_LIMIT = "max_response_mib"  # a limit that UNAVAILABLE can name, and that the same output exceeds again
PAUSE_SECONDS = 0.5  # time after which a request is sent again
FIND_SECONDS = 3.0  # time for the server to name its model


class Server:
    """A model of a server. An asynchronous context manager.

    Args:
        url: gRPC endpoint; None is the default one.
        model: name of the model.
        is_fixed: whether the user has chosen the name; then `find_name` does not change it.
        retry_seconds: time for which a request without output is sent again while the server fails.

    Raises ValueError for an invalid URL.
    """

    def __init__(self, url: str | None, model: str, *, is_fixed: bool, retry_seconds: float) -> None:
        self._url = url
        self._is_fixed = is_fixed
        self._retry_seconds = retry_seconds
        self._finding = asyncio.Lock()
        self._open = AsyncExitStack()
        self._use(model)

    def _use(self, model: str) -> None:
        self.name = model
        self.plain_client = AsyncClient(self._url, model)  # for questions that are asked once
        self.client = self.plain_client.with_transport(
            lambda transport: RetryingTransport(transport, self._should_retry, PAUSE_SECONDS)
        )
        # The client before it may still have streams; all are closed at the end.
        self._open.push_async_callback(self.plain_client.close)

    async def __aenter__(self) -> None:
        """Do nothing: clients connect on first use."""

    async def __aexit__(self, *reason: object) -> None:
        await self._open.aclose()

    async def find_name(self, outdated: str) -> bool:
        """Ask the server again for the name of its model. Return whether `name` is now another than `outdated`.

        A server that has been restarted may serve under another name. One that does not answer keeps its name.
        """
        async with self._finding:
            if self.name == outdated and not self._is_fixed:
                found = await asyncio.to_thread(_find, self._url)
                if found not in (None, outdated):
                    self._use(found)
            return self.name != outdated

    def _should_retry(self, error: PagedError, seconds: float) -> bool:
        is_passing = error.code == "UNAVAILABLE" or any(text in str(error) for text in _RESTART_TEXTS)
        return is_passing and OUTPUT_LIMIT not in str(error) and seconds + PAUSE_SECONDS <= self._retry_seconds


def _find(url: str | None) -> str | None:
    try:
        return find_model(url or DEFAULT_URLS["grpc"], "grpc", FIND_SECONDS)
    except PagedError:
        return None
