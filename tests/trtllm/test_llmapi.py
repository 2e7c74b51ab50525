"""Conversion of the tensors of TensorRT-LLM's LLM API model, without a server."""

import json

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.trtllm import llmapi
from paged_backend.trtllm.tensors import LLMAPI, LLMAPI_OUTPUTS, NUMPY_TYPES
from tests.support.trtllm_requests import ask, rejection, sampling

GREEDY = {"max_tokens": 5, "temperature": 0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"temperature": [0.0], "top_k": [5]}, GREEDY),
        ({"temperature": [0.5], "top_k": [1]}, GREEDY),
        ({"temperature": [0.5], "top_p": [0.0]}, GREEDY),
        ({"temperature": [0.5]}, {"max_tokens": 5, "temperature": 0.5}),
        ({"top_k": [0]}, {"max_tokens": 5, "top_k": 0}),
        ({"top_p": [0.9], "seed": [3]}, {"max_tokens": 5, "top_p": 0.9, "seed": 3}),
        ({"best_of": [3], "top_k": [9]}, {"max_tokens": 5, "best_of": 3, "top_k": 9}),
        ({"stop": ["a", "", "b"]}, GREEDY | {"stop": ["a", "b"]}),
        (
            {"frequency_penalty": [0.5], "presence_penalty": [-0.5]},
            GREEDY | {"frequency_penalty": 0.5, "presence_penalty": -0.5},
        ),
    ],
)
def test_sampling_defaults_match_the_llm_api(given, expected):
    assert sampling(LLMAPI, **{f"sampling_param_{name}": value for name, value in given.items()}) == expected


def test_defaults():
    tensors = {"text_input": np.array([b"Hello"], np.object_)}
    (one,) = llmapi.read(tensors, streams=False)
    assert json.loads(one.tensors["sampling_parameters"][0]) == {"max_tokens": 32, "temperature": 0}
    assert one.tensors.keys() == {"sampling_parameters", "text_input"}
    with pytest.raises(RequestError, match="streaming=true: Streaming is only supported in decoupled mode"):
        llmapi.read(tensors | {"streaming": np.array([True])}, streams=False)


def test_adapters_are_selected_by_name():
    asked = {"lora_id": [4], "lora_name": ["pirate"], "lora_path": ["/adapters/pirate"]}
    assert sampling(LLMAPI, **asked)["lora_name"] == "pirate"
    assert (
        rejection(LLMAPI, **asked, lora_ckpt_source=["nemo"]) == 'lora_ckpt_source="...": not supported; leave it out'
    )


def test_a_batch_of_prompts_is_rejected():
    assert rejection(LLMAPI, text_input=["a", "b"]) == "text_input: has 2 elements per row; must have 1"


TIMES = [f"{one}_time_ns" for one in ("arrival", "first_scheduled", "first_token", "last_token")]
RECEIPT = {"blocks_new": 4, "blocks_reused": 3, "blocks_missed": 1, "guessed_tokens": 4, "accepted_tokens": 1}


def test_stream_responses_have_the_whole_text_and_all_outputs():
    flags = {f"return_{one}": [True] for one in ("finish_reason", "stop_reason", "cumulative_logprob")}
    one = ask(LLMAPI, streaming=[True], sampling_param_return_perf_metrics=[True], **flags)
    assert {name for name in one.tensors if name.startswith("return_")} == {*flags, "return_receipt"}
    response = {
        "text_output": np.array([b"The "], np.object_),
        "finish_reason": np.array([b"None"], np.object_),
        "stop_reason": np.array([b"None"], np.object_),
        "cumulative_logprob": np.array([-1.5], np.float32),
    }
    (first,) = llmapi.write(one, response)
    assert {name: value.tolist() for name, value in first.items()} == {
        "text_output": [b"The "], "finish_reason": [b"None"], "stop_reason": [b"None"], "cumulative_logprob": [-1.5],
    }  # fmt: skip
    receipt = RECEIPT | {name: index for index, name in enumerate(TIMES)}
    response |= {"text_output": np.array([b"sea"], np.object_)}
    (last,) = llmapi.write(one, response | {"receipt": np.array([json.dumps(receipt).encode()], np.object_)})
    assert last.keys() == LLMAPI_OUTPUTS.keys()
    for name, value in last.items():
        assert (value.dtype, value.shape) == (NUMPY_TYPES[LLMAPI_OUTPUTS[name].data_type], (1,)), name
    assert last["text_output"].tolist() == [b"The sea"]
    assert [last[f"kv_cache_{one}"].item() for one in ("reused_block", "missed_block", "hit_rate")] == [3, 1, 0.75]
    assert (last["kv_cache_alloc_new_blocks"], last["kv_cache_alloc_total_blocks"]) == (4, 7)
    assert (last["acceptance_rate"], last["total_draft_tokens"]) == (0.25, 4)
    assert [last[name].item() for name in TIMES] == [0, 1, 2, 3]
