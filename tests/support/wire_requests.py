"""Requests as Triton passes them to a Python model, built from Python values."""

import numpy as np
import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.limits import InputLimits
from paged_backend.server.wire.call import read_call, read_prompt


def text(value):
    return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


def flag(value):
    return np.array([value])


def read(parameters=None, timeout_us=0, input_limits=InputLimits(), **tensors):
    return read_prompt(read_call(tensors, parameters or {}, timeout_us, input_limits=input_limits), input_limits)


def rejection(parameters=None, **tensors):
    with pytest.raises(RequestError) as caught:
        read(parameters, **tensors)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return str(caught.value).removeprefix("INVALID_ARGUMENT: ")


def strings(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)
