"""Launches that start while the previous one ends (programmatic dependent launch), on Hopper and later.

Without it, a GPU starts a kernel when the previous one has ended, so it has little to do for a microsecond or two. A
decode step has hundreds of them. A dependent kernel starts earlier, and waits by itself before it uses anything that
the previous kernel may write, or writes what that one may still read. Before that, it can load weights, as they never
change.

A kernel waits for the previous kernel only. That one has waited too, unless its launch was not dependent, in which case
it has started after the end of the kernel before it. So all earlier kernels have ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(128)  # bytes of a line of the L2 cache


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the end of the previous kernel, and let the next one start, which then waits for this one."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(matrix, row, stride, first, end, ITEMSIZE: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the elements [first, end) of some rows of a matrix into the L2 cache, up to MOST of each.

    row: [n] row numbers, -1 for none. MOST: a power of two, and a multiple of a line.
    """
    STEP: tl.constexpr = LINE // ITEMSIZE
    column = first + tl.arange(0, MOST // STEP) * STEP
    place = matrix + (row.to(tl.int64) * stride)[:, None] + tl.minimum(column, end - 1)[None, :]
    used = ((row >= 0)[:, None] & (column < end)[None, :]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [place, used], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
