"""Fixtures of the end-to-end tests: real Triton servers. They live in tests/support/triton.py with the raw clients."""

from tests.support.triton import (
    adapted_model,
    adapted_server,
    adapters,
    demo_model,
    demo_server,
    server,
    short_model,
    tiny_server,
    traces,
    two_servers,
)

__all__ = [
    "adapted_model",
    "adapted_server",
    "adapters",
    "demo_model",
    "demo_server",
    "server",
    "short_model",
    "tiny_server",
    "traces",
    "two_servers",
]
