"""Memory in pages of 2 MiB."""

import ctypes
import mmap
import sys

from torch import Tensor

HUGE_PAGE = 1 << 21


def request_huge_pages(memory: Tensor) -> None:
    """Ask the system to use huge pages for CPU memory that has not been written yet; it may ignore this.

    With pages of 4 KiB, most of the addresses that attention and linear layers prefetch are not in the processor's
    table of pages (TLB), and looking one up can take longer than reading memory, above all in a virtual machine.
    """
    if sys.platform != "linux" or memory.device.type != "cpu":
        return
    begin = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (memory.data_ptr() + memory.nbytes) // HUGE_PAGE * HUGE_PAGE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
