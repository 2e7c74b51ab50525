"""Requests to the system about the pages of memory."""

import ctypes
import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
CHUNK = 8 * HUGE_PAGE  # memory that small tensors share, and that one call populates
ALIGNMENT = 64  # bytes
MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in the mmap module


def request_huge_pages(memory: Tensor) -> None:
    """Ask the system to use huge pages for CPU memory that has not been written yet; it may ignore this.

    With pages of 4 KiB, most of the addresses that attention and linear layers prefetch are not in the processor's
    table of pages (TLB), and looking one up can take longer than reading memory, above all in a virtual machine.
    """
    if sys.platform == "linux":
        _advise(memory, 0, memory.nbytes, HUGE_PAGE, mmap.MADV_HUGEPAGE)


class HugePageAllocator:
    """Allocates tensors that are kept for long, such as weights, in huge pages, even tensors smaller than a page.

    Small tensors are parts of a chunk, whose memory is freed when none of them is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the newest chunk

    def copy(self, values: Tensor) -> Tensor:
        """Return a dense copy of a CPU tensor."""
        if values.nbytes >= CHUNK:
            whole = torch.empty_like(values, memory_format=torch.contiguous_format)
            request_huge_pages(whole)
            return whole.copy_(values)
        return self._take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)

    def _take(self, nbytes: int) -> Tensor:
        with self._lock:
            if nbytes > len(self._chunk):
                memory = torch.empty(CHUNK + HUGE_PAGE, dtype=torch.uint8)
                start = -memory.data_ptr() % HUGE_PAGE
                self._chunk = memory[start : start + CHUNK]
                request_huge_pages(self._chunk)
            taken = self._chunk[:nbytes]
            self._chunk = self._chunk[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
            return taken


def populate_pages(memory: Tensor, threads: int) -> None:
    """Make the system provide the pages of CPU memory on several threads, as writing to them would, without changing
    their content. Linux before 5.14 and other systems ignore this."""
    if sys.platform == "linux":
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, memory.nbytes, CHUNK):
                end = min(start + CHUNK, memory.nbytes)
                pool.submit(_advise, memory, start, end, mmap.PAGESIZE, MADV_POPULATE_WRITE)


def release_pages(memory: Tensor) -> None:
    """Give the whole pages of CPU memory back to the system, which provides zeros when they are used again."""
    if sys.platform == "linux":
        _advise(memory, 0, memory.nbytes, mmap.PAGESIZE, mmap.MADV_DONTNEED)


def _advise(memory: Tensor, start: int, end: int, page: int, advice: int) -> None:
    """Call madvise for the whole pages of a range of CPU memory."""
    if memory.device.type != "cpu":
        return
    begin = -(-(memory.data_ptr() + start) // page) * page
    size = (memory.data_ptr() + end) // page * page - begin
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
