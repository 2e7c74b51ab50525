"""Memory in huge pages, as far as the system shows what was requested."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from paged_kernels.cpu.huge_pages import CHUNK, HUGE_PAGE, HugePageAllocator, release_pages, request_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


def is_requested(address):
    """Whether the kernel lists the flag "hg" (huge pages) for the memory at this address."""
    for mapping in re.finditer(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([^\n]*)", Path("/proc/self/smaps").read_text(), re.M | re.S
    ):
        if int(mapping[1], 16) <= address < int(mapping[2], 16):
            return "hg" in mapping[3].split()
    raise AssertionError("not mapped")


def test_whole_pages_of_the_memory_are_marked():
    memory = torch.empty(8 * HUGE_PAGE, dtype=torch.uint8)
    request_huge_pages(memory)
    assert is_requested(memory.data_ptr() + 4 * HUGE_PAGE)
    assert memory.fill_(7).eq(7).all()


def test_small_memory_is_left_alone():
    memory = torch.empty(1000)
    request_huge_pages(memory)
    assert memory.fill_(1.5).sum() == 1500


@pytest.mark.parametrize("size", [HUGE_PAGE // 8, CHUNK])
def test_allocated_copies_are_in_huge_pages(size):
    values = torch.arange(3 * size // 4, dtype=torch.float32).view(3, -1).T
    allocator = HugePageAllocator()
    copies = [allocator.copy(values + index) for index in range(3)]
    for index, copy in enumerate(copies):
        assert copy.is_contiguous() and torch.equal(copy, values + index)
        assert copy.data_ptr() % 64 == 0
        assert is_requested(copy.data_ptr() + size // 2)


def test_copies_of_nothing():
    assert HugePageAllocator().copy(torch.empty(3, 0)).shape == (3, 0)


def test_released_pages_are_zeros():
    """Bytes of pages that the memory shares with other memory keep their content."""
    memory = torch.full((4 * HUGE_PAGE + 100,), 7, dtype=torch.uint8)
    part = memory[50:-50]
    release_pages(part)
    assert part[mmap.PAGESIZE : -mmap.PAGESIZE].count_nonzero() == 0
    assert memory[:50].eq(7).all() and memory[-50:].eq(7).all()
    assert part.fill_(3).eq(3).all()
