"""The upload of a batch's tensors: views into one buffer, in a fixed order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.execution.upload import ALIGNMENT, DeviceUpload, map_tensors, tensors_of


@dataclass(frozen=True, eq=False)
class Inner:
    values: Tensor
    name: str = "inner"


@dataclass(frozen=True, eq=False)
class Tree:
    first: Tensor
    inner: Inner
    more: tuple[Tensor | None, ...]


def tree():
    return Tree(torch.arange(3), Inner(torch.ones(5, dtype=torch.int32)), (None, torch.full((2, 2), 7.0)))


def test_tensors_are_mapped_in_order_and_other_values_stay():
    assert [len(tensor) for tensor in tensors_of(tree())] == [3, 5, 2]
    mapped = map_tensors(tree(), lambda tensor: tensor + 1)
    assert (mapped.first.tolist(), mapped.inner.name, mapped.more[0]) == ([1, 2, 3], "inner", None)


def test_a_tensor_that_occurs_twice_is_uploaded_once():
    lens = torch.arange(4)
    twice = Tree(torch.ones(2), Inner(lens), (lens,))
    assert DeviceUpload.size_of(twice) == DeviceUpload.size_of(Inner(lens)) + ALIGNMENT
    views = DeviceUpload.views(twice, torch.zeros(DeviceUpload.size_of(twice), dtype=torch.uint8))
    assert views.inner.values is views.more[0]


def test_views_read_what_was_uploaded():
    made = tree()
    memory = torch.zeros(DeviceUpload.size_of(made), dtype=torch.uint8)
    assert len(memory) % ALIGNMENT == 0
    views = DeviceUpload.views(made, memory)
    DeviceUpload(torch.device("cpu"))(made, head=memory)
    for view, tensor in zip(tensors_of(views), tensors_of(made), strict=True):
        assert torch.equal(view, tensor) and view.data_ptr() % ALIGNMENT == memory.data_ptr() % ALIGNMENT


def test_only_the_fixed_part_is_written_to_the_head():
    made = tree()
    head = torch.zeros(DeviceUpload.size_of(made.first), dtype=torch.uint8)
    assert DeviceUpload(None)(made, head=head) is made
    assert torch.equal(DeviceUpload.views(made.first, head), made.first)
