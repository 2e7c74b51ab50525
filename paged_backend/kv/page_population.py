"""Populates the memory pages of a KV cache on a CPU before steps write to them."""

from __future__ import annotations

import os
import threading
import weakref

from paged_backend.kv.cache import KVCache
from paged_kernels.cpu.huge_pages import HUGE_PAGE, populate_pages

LOWEST_PRIORITY = 19  # nice value
THREAD_NAME = "kv-cache-pages"


def populate_in_background(cache: KVCache) -> threading.Thread:
    """Start a thread that populates the pages of all blocks, those with the lowest numbers first, and return it.

    Without it, the first write to a page waits until the system has cleared the page: a sixth of the time of a prefill
    (2 cores of an AMD EPYC, Zen 5, in a virtual machine). The thread has the lowest priority, and ends early when the
    cache is no longer referenced.
    """
    thread = threading.Thread(target=_populate, args=[weakref.ref(cache)], name=THREAD_NAME, daemon=True)
    thread.start()
    return thread


def wait_until_populated() -> None:
    """Wait until the pages of all caches of this process are populated."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


def _populate(reference: weakref.ref[KVCache]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    start = 0  # bytes of each tensor that are done
    while (cache := reference()) is not None:
        if start >= max((tensor.nbytes for tensor in cache.tensors), default=0):
            return
        for tensor in cache.tensors:
            populate_pages(tensor, start, min(start + HUGE_PAGE, tensor.nbytes))
        del cache, tensor
        start += HUGE_PAGE
