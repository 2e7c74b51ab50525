"""Tensors in the frames of the local socket."""

import numpy as np
import pytest

from paged_backend.server.local_tensors import read_tensors, write_tensors
from paged_backend.server.tensors import INPUTS
from paged_backend.utils.local_socket import FrameError


def test_tensors_round_trip():
    tensors = {
        "text_input": np.array(["é".encode(), b"\xff"], dtype=np.object_),
        "input_ids": np.array([1, 2], np.int32),
        "stream": np.array([True]),
    }
    read = read_tensors(write_tensors(tensors), INPUTS)
    assert {name: one.tolist() for name, one in read.items()} == {name: one.tolist() for name, one in tensors.items()}
    assert {name: one.dtype for name, one in read.items()} == {name: one.dtype for name, one in tensors.items()}


@pytest.mark.parametrize("tensors", [[1], {"other": [1]}, {"stream": 1}, {"input_ids": [[1]]}, {"text_input": [1]}])
def test_invalid_tensors_are_rejected(tensors):
    with pytest.raises(FrameError):
        read_tensors(tensors, INPUTS)
