"""Fixtures of the tests of utilities."""

from tests.support.local_engine import engine, socket_directory

__all__ = ["engine", "socket_directory"]
