"""Tensors: their declarations, and their form in the frames of the local socket."""

import re
from pathlib import Path

import numpy as np
import pytest

from paged_backend.server.wire.tensors import INPUTS, OUTPUTS, read_tensors, write_tensors
from paged_backend.utils.local_socket import FrameError
from paged_client import wire as client_wire

CONFIG = Path(__file__).parents[3] / "model_repository/paged_llm/config.pbtxt"


def tensors_of(section):
    """Return {name: (data type, dims)} from config.pbtxt."""
    body = re.search(rf"^{section} \[(.*?)^\]", CONFIG.read_text(), re.M | re.S).group(1)
    rows = re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (-?\d+) \]', body)
    assert len(rows) == body.count("name:")
    return {name: (kind, (int(dims),)) for name, kind, dims in rows}


@pytest.mark.parametrize("section", ["input", "output"])
def test_config_backend_and_client_declare_the_same_tensors(section):
    specs = {"input": INPUTS, "output": OUTPUTS}[section]
    assert tensors_of(section) == {name: (spec.data_type, spec.dims) for name, spec in specs.items()}
    assert tensors_of(section) == {"input": client_wire.INPUTS, "output": client_wire.OUTPUTS}[section]


def test_tensors_match_the_vllm_backend():
    """The tensors that its documentation lists."""
    theirs = {
        "text_input": ("TYPE_STRING", (1,)),
        "image": ("TYPE_STRING", (-1,)),
        "stream": ("TYPE_BOOL", (1,)),
        "sampling_parameters": ("TYPE_STRING", (1,)),
        "exclude_input_in_output": ("TYPE_BOOL", (1,)),
        "return_finish_reason": ("TYPE_BOOL", (1,)),
        "return_cumulative_logprob": ("TYPE_BOOL", (1,)),
        "return_logprobs": ("TYPE_BOOL", (1,)),
        "return_num_input_tokens": ("TYPE_BOOL", (1,)),
        "return_num_output_tokens": ("TYPE_BOOL", (1,)),
        "embedding_request": ("TYPE_STRING", (1,)),
    }
    assert theirs.items() <= tensors_of("input").items()
    assert tensors_of("output").keys() >= {
        "text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens",
    }  # fmt: skip


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
