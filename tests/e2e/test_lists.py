"""List sampling parameters as tensors, over both protocols."""

import json

import numpy as np
import pytest

from tests.support.triton import post, raw_stream

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 16, "exclude_input_in_output": True}


def generated(server, **inputs):
    status, body = post(server, {"text_input": PROMPT, **GREEDY, **inputs})
    assert status == 200, body
    return json.loads(body)["text_output"]


def test_stop_strings_over_http_as_list_and_scalar(server):
    whole = generated(server)
    stop = whole[4:8]
    cut = whole[: whole.index(stop)]
    assert generated(server, stop=["never said", stop]) == cut
    assert generated(server, stop=stop) == generated(server, parameters={"stop": stop}) == cut


def test_lists_over_grpc(server):
    said = generated(server, ignore_eos=True)
    with raw_stream(server) as stream:
        stream.send(
            text_input=PROMPT,
            sampling_parameters={"temperature": 0, "max_tokens": 16, "ignore_eos": True},
            exclude_input_in_output=True,
            return_finish_reason=True,
            stop=np.array([said[4:8].encode(), b"never said"], dtype=np.object_),
            stop_token_ids=np.array([3, 4], dtype=np.int32),
        )
        (answer,) = stream.all()
    assert (answer.text, answer.outputs["finish_reason"]) == (said[: said.index(said[4:8])], [b"stop"])


def test_bad_words_and_allowed_tokens(server):
    word = generated(server).split()[0]
    assert word not in generated(server, bad_words=[word])
    assert word not in generated(server, parameters={"bad_words": " " + word})
    assert generated(server, allowed_token_ids=[28]) == "," * 16  # the demo model's
    status, body = post(server, {"text_input": PROMPT, **GREEDY, "sampling_parameters": '{"logit_bias": {"28": 100}}'})
    assert (status, json.loads(body)["text_output"]) == (200, "," * 16)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"stop": ["x"] * 17}, "must be at most 16 strings"),
        ({"stop": ["x" * 257]}, "must be at most 256 bytes"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1: must be 0.."),
        ({"allowed_token_ids": [0], "bad_words": ["x"] * 129}, "must be at most 128 strings"),
        ({"choice": ["a", ""]}, "choice="),
        ({"stop": ["a"], "sampling_parameters": '{"stop": "b"}'}, "stop: is both a tensor and a sampling parameter"),
    ],
)
def test_invalid_lists_are_rejected(server, inputs, reason):
    status, body = post(server, {"text_input": PROMPT, **inputs})
    assert status == 400
    assert reason in json.loads(body)["error"]
