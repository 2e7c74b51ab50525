"""Python client of the paged LLM backend: `Client`, `AsyncClient`, and their result and exception types."""

from client.async_client import AsyncClient
from client.async_stream import AsyncStream
from client.sync_client import Client
from client.sync_stream import Stream
from client.types import Adapter, Completion, Delta, Embedding, PagedError, PoolMap, TokenLogprob

__all__ = [
    "Adapter",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "Embedding",
    "PagedError",
    "PoolMap",
    "Stream",
    "TokenLogprob",
]
