"""Products of tiles in Triton's interpreter that add in order, as numpy's order depends on the shapes."""

from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter


def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Add the products of each element of the result one after the other, in float32, to those of `d`."""
    left, right, total = a.data.astype(np.float32), b.data.astype(np.float32), d.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k]
    return interpreter.TensorHandle(total, d.dtype.scalar)
