"""The operations of `paged_kernels.ops`, found in its source."""

import ast
import inspect

from paged_kernels import ops

# For each operation the constant arguments of its dispatch: function, and module if its name differs.
DISPATCHES = [
    [argument.value for argument in node.args[1:]]
    for node in ast.walk(ast.parse(inspect.getsource(ops)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_dispatch"
]
