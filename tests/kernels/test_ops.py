"""Dispatch of operations by device: `ops` imports an implementation by name when the first tensor arrives."""

import ast
import inspect

import pytest

from paged_kernels import ops

DISPATCHES = [
    [argument.value for argument in node.args[1:]]
    for node in ast.walk(ast.parse(inspect.getsource(ops)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_dispatch"
]


@pytest.mark.parametrize("on_cpu", [False, True], ids=["GPU", "CPU"])
@pytest.mark.parametrize("names", DISPATCHES, ids=lambda names: names[0])
def test_every_operation_has_an_implementation(names, on_cpu):
    function, module = names[0], names[-1]
    found = ops._implementation.__wrapped__(module, function, on_cpu)
    assert callable(found)
    assert found.__module__.startswith("paged_kernels.cpu." if on_cpu else "paged_kernels.")


def test_all_operations_are_covered():
    assert len(DISPATCHES) == 9
