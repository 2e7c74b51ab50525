"""A grammar compiler that the tests of a module share."""

import pytest

from tests.support.grammars import create_compiler


@pytest.fixture(scope="module")
def grammars():
    compiler = create_compiler()
    yield compiler
    compiler.stop()
