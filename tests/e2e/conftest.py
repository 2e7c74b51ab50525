"""Fixtures of the end-to-end tests: real Triton servers. They live in tests/support/triton.py with the raw clients."""

from tests.support.triton import demo_model, server, tiny_server

__all__ = ["demo_model", "server", "tiny_server"]
