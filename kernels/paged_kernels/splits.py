"""The end of a sum that several programs split: the last of them to finish reads the results of the others."""

import triton
import triton.language as tl


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
