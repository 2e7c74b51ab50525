"""Memory of tensors that is moved to the host and back while the tensors stay the same objects."""

from functools import partial

import pytest
import torch
from torch import nn

from paged_backend.engine import host_copy
from paged_backend.engine.host_copy import HostCopy, allocate, distinct_storages, fill_zeros, find_tensors, release


class Table:
    """An object that is no module and holds tensors where modules do not look."""

    def __init__(self):
        kept = torch.arange(33.0)
        self.scale = partial(lambda x, factor: x * factor, factor=torch.tensor([3.0]))
        self.rows = {"some": [torch.ones(3, 2), (torch.zeros(5),)]}
        self.look_up = lambda: kept


def model():
    """A model with tied weights, a fused view, a buffer, and tensors in attributes."""
    made = nn.Sequential(nn.Linear(10, 7), nn.Linear(10, 7), nn.BatchNorm1d(7))
    made[1].weight = made[0].weight
    made.fused = made[0].weight.data[2:5]
    made.table = Table()
    return made


def test_tensors_of_attributes_closures_and_containers_are_found():
    made = model()
    found = {id(one) for one in find_tensors(made)}
    expected = [*made.parameters(), *made.buffers(), made.fused, made.table.look_up(), made.table.rows["some"][0]]
    expected += [made.table.rows["some"][1][0], made.table.scale.keywords["factor"]]
    assert found >= {id(one) for one in expected}
    assert all(one.numel() < 100 for one in find_tensors(made)), "tensors of other objects were followed"


def test_tied_weights_and_views_are_one_storage():
    made = model()
    storages = distinct_storages((made[0].weight, made[1].weight, made.fused, torch.empty(0)))
    assert [storage.nbytes() for storage in storages] == [280]


@pytest.mark.parametrize("chunk", [1, 100, 280, 1 << 20])
def test_every_bit_is_restored(monkeypatch, chunk):
    """Sizes of chunks that cut storages anywhere."""
    monkeypatch.setattr(host_copy, "CHUNK_BYTES", chunk)
    made = model()
    made[2].running_mean[0] = torch.nan
    tensors = list(find_tensors(made))
    before = [one.clone() for one in tensors]
    copy = HostCopy(distinct_storages(tensors))
    assert copy.nbytes == sum(storage.nbytes() for storage in distinct_storages(tensors))
    release(copy.storages)
    left = len(distinct_storages(tensors))  # a message with the tensors would read them
    assert left == 0
    allocate(copy.storages, copy.sizes)
    copy.write_back()
    for one, expected in zip(tensors, before, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    made[0].weight.data[2, 0] = 5.0
    assert made.fused[0, 0] == made[1].weight[2, 0] == 5.0


def test_nothing_is_allocated_if_not_everything_fits():
    tensors = [torch.ones(4), torch.ones(4)]
    storages = distinct_storages(tensors)
    release(storages)
    with pytest.raises(RuntimeError):
        allocate(storages, [16, 1 << 60])
    left = len(distinct_storages(tensors))
    assert left == 0


def test_zeros_are_written_to_memory_of_pytorch():
    tensor = torch.ones(5)
    fill_zeros(distinct_storages([tensor]))
    assert not tensor.any()
