"""The pages of a KV cache become resident without being written."""

import mmap
import re
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from paged_backend.kv import cache as kv_cache
from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape, populate_in_background, wait_until_populated
from paged_kernels.cpu.huge_pages import HUGE_PAGE
from tests.support.waiting import WAIT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


def new_cache():
    """A cache of 32 MiB, of which no page is resident."""
    layer = LayerShape(num_kv_heads=4, head_dim=64)
    return KVCache.allocate(CacheLayout.of([layer] * 2, 16, torch.bfloat16), 1024, torch.device("cpu"))


def resident_bytes(tensor):
    """The bytes of the mappings that hold a tensor that are in memory."""
    begin, found = tensor.data_ptr(), 0
    for mapping in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S
    ):
        if int(mapping[1], 16) < begin + tensor.nbytes and int(mapping[2], 16) > begin:
            found += int(mapping[3]) * 1024
    return found


def test_every_page_becomes_resident_and_keeps_its_content():
    cache = new_cache()
    memory = cache.memory
    assert memory.nbytes == 16 * HUGE_PAGE
    memory[::100] = 3
    populate_in_background(cache).join(WAIT)
    assert resident_bytes(memory) >= memory.nbytes - 2 * mmap.PAGESIZE
    assert int((memory == 3).sum()) == memory[::100].numel() == int(memory.count_nonzero())


def test_the_thread_ends_when_the_cache_is_dropped(monkeypatch):
    begun, dropped, calls = threading.Event(), threading.Event(), []

    def populate(*arguments):
        calls.append(len(arguments))
        begun.set()
        assert dropped.wait(WAIT)

    monkeypatch.setattr(kv_cache, "populate_pages", populate)
    cache = new_cache()
    reference, thread = weakref.ref(cache), populate_in_background(cache)
    assert begun.wait(WAIT)
    del cache
    dropped.set()
    thread.join(WAIT)
    assert reference() is None and not thread.is_alive()
    assert len(calls) == 1  # of 16 huge pages


def test_waiting_for_all_caches():
    caches = [new_cache(), new_cache()]
    threads = [populate_in_background(cache) for cache in caches]
    wait_until_populated()
    assert not any(thread.is_alive() for thread in threads)
