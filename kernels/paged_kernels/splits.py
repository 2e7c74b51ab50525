"""Merging the results of programs that split a sum: the last one to finish reads those of the others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.launch_table import power_of_two

_zeroed: dict[torch.device, list[Tensor]] = {}


def zeros(count: int, device: torch.device) -> Tensor:
    """Return at least `count` int32 zeros, which kernels may change if they leave zeros behind.

    All launches of a device share them, since they run one after the other. Earlier and smaller tensors are kept for
    the CUDA graphs that use them.
    """
    made = _zeroed.setdefault(device, [])
    if not made or len(made[-1]) < count:
        made.append(torch.zeros(power_of_two(count), dtype=torch.int32, device=device))
    return made[-1]


@triton.jit
def is_last(arrivals, count):  # type: ignore[no-untyped-def]
    """Return whether `count` programs, including this one, have stored their results.

    The last one resets the counter for the next launch, and sees what the others have stored if its loads bypass the
    L1 cache.
    """
    tl.debug_barrier()  # all threads of the program have stored
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrivals, 0)
    return last
