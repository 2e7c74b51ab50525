"""Dispatch of operations by device: `ops` imports an implementation by name when the first tensor arrives."""

import pytest

from paged_kernels import ops
from tests.support.operations import DISPATCHES


@pytest.mark.parametrize("on_cpu", [False, True], ids=["GPU", "CPU"])
@pytest.mark.parametrize("names", DISPATCHES, ids=lambda names: names[0])
def test_every_operation_has_an_implementation(names, on_cpu):
    function, module = names[0], names[-1]
    found = ops._implementation.__wrapped__(module, function, on_cpu)
    assert callable(found)
    assert found.__module__.startswith("paged_kernels.cpu." if on_cpu else "paged_kernels.")


def test_all_operations_are_covered():
    assert len(DISPATCHES) == 11
