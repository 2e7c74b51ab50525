"""The pages of a KV cache become resident without being written."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


def resident_bytes(tensor):
    """The bytes of the mappings that hold a tensor that are in memory."""
    begin, found = tensor.data_ptr(), 0
    for mapping in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S
    ):
        if int(mapping[1], 16) < begin + tensor.nbytes and int(mapping[2], 16) > begin:
            found += int(mapping[3]) * 1024
    return found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("blocks", [1, 1023, 1024])
def test_every_page_becomes_resident_and_keeps_its_content(threads, blocks):
    layer = LayerShape(num_kv_heads=4, head_dim=64)
    cache = KVCache.allocate(CacheLayout.of([layer] * 2, 16, torch.bfloat16), blocks, torch.device("cpu"))
    memory = cache.memory.view(-1)
    memory[::100] = 3
    cache.populate(threads)
    assert resident_bytes(memory) >= memory.nbytes - 2 * mmap.PAGESIZE
    assert int((memory == 3).sum()) == memory[::100].numel() == int(memory.count_nonzero())
