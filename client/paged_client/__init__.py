"""Python client of the paged LLM backend: `Client`, `AsyncClient`, and their result and exception types."""

from paged_client.async_client import AsyncClient
from paged_client.async_stream import AsyncStream
from paged_client.request_body import http_body
from paged_client.sync_client import Client
from paged_client.sync_stream import Stream
from paged_client.types import (
    Adapter,
    Classification,
    Completion,
    Delta,
    Embedding,
    ModelInfo,
    PagedError,
    PoolMap,
    TokenLogprob,
)

__all__ = [
    "Adapter",
    "AsyncClient",
    "AsyncStream",
    "Classification",
    "Client",
    "Completion",
    "Delta",
    "Embedding",
    "ModelInfo",
    "PagedError",
    "PoolMap",
    "Stream",
    "TokenLogprob",
    "http_body",
]
