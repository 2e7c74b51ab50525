"""Fixtures of the tests of the documentation: a real Triton server. They live in tests/support/triton.py."""

from tests.support.triton import demo_model, server

__all__ = ["demo_model", "server"]
