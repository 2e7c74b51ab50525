"""Requests of tensorrtllm_backend clients, for tests without a server."""

import json

import numpy as np
import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.tensors import BLS, CORE, ENSEMBLE, INPUTS, LLMAPI

NUMPY = {
    "TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32,
    "TYPE_FP16": np.float16, "TYPE_UINT8": np.uint8, "TYPE_BOOL": np.bool_, "TYPE_STRING": np.object_,
}  # fmt: skip


NEEDED = {
    ENSEMBLE: {"text_input": ["Hello"], "max_tokens": [5]},
    BLS: {"text_input": ["Hello"], "max_tokens": [5]},
    CORE: {"input_ids": [7, 8, 9], "input_lengths": [3], "request_output_len": [5]},
    LLMAPI: {"text_input": ["Hello"], "sampling_param_max_tokens": [5]},
}


def rows(model, *values):
    """Return tensors with a row per dict of values."""
    made = {}
    for name in values[0]:
        lists = [one[name] for one in values]
        kind = NUMPY[INPUTS[model][name].data_type]
        if kind is np.object_:
            lists = [[word.encode() if isinstance(word, str) else word for word in words] for words in lists]
        made[name] = np.array(lists, dtype=kind)
    return made


def ask(model=ENSEMBLE, **values):
    """Return the RowRequest of a request with one row; the LLM API model has no rows."""
    tensors = rows(model, NEEDED[model] | values)
    (one,) = create_interface(model).read(
        {name: value[0] for name, value in tensors.items()} if model == LLMAPI else tensors
    )
    return one


def sampling(model=ENSEMBLE, **values):
    return json.loads(ask(model, **values).tensors["sampling_parameters"][0])


def rejection(model=ENSEMBLE, **values):
    with pytest.raises(RequestError) as caught:
        ask(model, **values)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    return str(caught.value).removeprefix("INVALID_ARGUMENT: ")
