"""Slots of the states of recurrent layers are copied, read and written whole, and do not affect each other."""

from types import SimpleNamespace

import pytest
import torch

from paged_backend.execution.runner import Runner
from paged_backend.kv import cache as kv_cache
from paged_backend.kv.cache import StateCache, StateShape, TensorShape, bytes_per_slot
from paged_backend.kv.ledger import Transfer, Transfers

SHAPES = [
    StateShape(TensorShape((6, 4), torch.bfloat16), TensorShape((2, 3, 5), torch.float32)),
    StateShape(TensorShape((6, 3), torch.bfloat16), None),
]


@pytest.fixture
def cache():
    cache = StateCache.allocate(SHAPES, num_slots=5, device=torch.device("cpu"))
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def snapshot(cache):
    return [cache.read_slot(slot) for slot in range(cache.num_slots)]


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_new_cache_is_zero_and_as_large_as_stated():
    cache = StateCache.allocate(SHAPES, num_slots=5, device=torch.device("cpu"))
    assert cache.num_slots == 5
    assert [tensor.dtype for tensor in cache.tensors] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert not any(tensor.any() for tensor in cache.tensors)
    assert sum(tensor.nbytes for tensor in cache.tensors) == 5 * bytes_per_slot(SHAPES)
    assert bytes_per_slot(SHAPES) == 6 * 4 * 2 + 2 * 3 * 5 * 4 + 6 * 3 * 2


def test_copies_read_their_sources_before_any_is_written(cache):
    before = snapshot(cache)
    cache.copy_slots([(0, 1), (1, 0), (2, 4)])
    after = snapshot(cache)
    for slot, source in enumerate((1, 0, 2, 3, 2)):
        assert equal(after[slot], before[source])


def test_no_copies_change_nothing(cache):
    before = snapshot(cache)
    cache.copy_slots([])
    assert all(map(equal, snapshot(cache), before))


def test_slots_are_copied_to_another_cache_and_back(cache, monkeypatch):
    """The other cache is in one allocation of pinned memory, whose rows begin at multiples of 16 bytes."""
    sizes = []
    monkeypatch.setattr(kv_cache, "pinned_zeros", lambda n: sizes.append(n) or torch.zeros(n, dtype=torch.uint8))
    host = StateCache.allocate(SHAPES, num_slots=3, device=torch.device("cpu"), pinned=True)
    assert sizes == [144 + 368 + 112]
    assert not any(tensor.any() for tensor in host.tensors)
    before = snapshot(cache)
    cache.copy_to(host, [(0, 2), (4, 1)])
    cache.write_slot(0, before[3])
    cache.write_slot(4, before[3])
    host.copy_to(cache, [(2, 4), (1, 0)])
    after = snapshot(cache)
    for slot, source in enumerate((4, 1, 2, 3, 0)):
        assert equal(after[slot], before[source])


def test_slot_on_the_host_is_a_copy_and_can_be_restored_elsewhere(cache):
    before = snapshot(cache)
    content = cache.read_slot(3)
    cache.write_slot(3, before[0])
    assert equal(content, before[3])
    cache.write_slot(1, content)
    after = snapshot(cache)
    for slot, source in enumerate((0, 3, 2, 0, 4)):
        assert equal(after[slot], before[source])


def test_a_step_moves_states_out_then_in_and_copies_last():
    """A slot whose state moves away is the target of one of the host's, which is then copied."""
    cache = StateCache.allocate(SHAPES, num_slots=5, device=torch.device("cpu"))
    host = StateCache.allocate(SHAPES, num_slots=2, device=torch.device("cpu"))
    for tensor in (*cache.tensors, *host.tensors):
        tensor.copy_(torch.randn(tensor.shape))
    device_before, host_before = snapshot(cache), snapshot(host)
    moved = Transfers((Transfer(0, 0),), (Transfer(1, 0),), (Transfer(0, 1),))
    Runner._move_states(SimpleNamespace(states=cache, host_states=host), moved)
    assert equal(host.read_slot(0), device_before[0])
    assert equal(cache.read_slot(0), host_before[1])
    assert equal(cache.read_slot(1), host_before[1])
