"""Fixtures of the tests of the C++ kernels."""

import pytest

from paged_kernels.cpu import native


@pytest.fixture
def threads():
    """Sets the number of threads until the end of the test."""
    before = native.threads()
    yield native.set_threads
    native.set_threads(before)
