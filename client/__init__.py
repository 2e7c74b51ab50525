"""Python client of the paged LLM backend: `Client`, `AsyncClient` and what they return and raise."""

from client.async_client import AsyncClient, AsyncStream
from client.sync_client import Client, Stream
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
