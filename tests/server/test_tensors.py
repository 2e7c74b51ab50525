"""The tensors of the model: the same schema in three places, and that of the vLLM backend."""

import re
from pathlib import Path

import pytest

from paged_backend.server.tensors import INPUTS, OUTPUTS
from paged_client import wire as client_wire

CONFIG = Path(__file__).parents[2] / "model_repository/paged_llm/config.pbtxt"


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
