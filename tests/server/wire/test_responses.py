"""Responses and error texts as the client gets them."""

import json

import numpy as np
import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.token_outputs import TokenLogprob
from paged_backend.server.wire.responses import Response, SampleOutput, error_text, write_response
from paged_backend.server.wire.tensors import NUMPY_TYPES, OUTPUTS
from tests.support.wire_requests import flag, read, text


def test_error_text_sent_to_clients():
    """Texts that clients compare are exactly those of the vLLM backend."""
    with pytest.raises(RequestError) as caught:
        read(text_input=text("x"), stream=flag(True), exclude_input_in_output=flag(False))
    letter = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert (caught.value.code, error_text(caught.value)) == (ErrorCode.INVALID_ARGUMENT, letter)
    values = {code: error_text(RequestError(code, "no")) for code in ErrorCode}
    assert values.pop(ErrorCode.CANCELLED) == "CANCELLED: no"
    assert values == {code: f"Error generating stream: {code.value}: no" for code in values}


@pytest.mark.parametrize("finish", [None, "stop"])
def test_a_response_has_the_requested_outputs_in_declared_types(finish):
    counts = {"return_finish_reason": flag(True), "return_num_input_tokens": flag(True)}
    call = read(text_input=text("x"), return_num_output_tokens=flag(True), **counts)
    part = SampleOutput("é", finish, [4, 5])
    outputs = write_response(Response(call.returns, [part], [1, 2, 3]))
    assert {name: value.tolist() for name, value in outputs.items()} == {
        "text_output": ["é".encode()],
        "finish_reason": [str(finish).encode()],
        "num_input_tokens": [3],
        "num_output_tokens": [2],
    }
    assert all(outputs[name].dtype == NUMPY_TYPES[OUTPUTS[name].data_type] for name in outputs)
    assert list(write_response(Response((), [part], [1, 2, 3]))) == ["text_output"]


def test_token_ids_and_offsets_of_all_samples_are_concatenated():
    call = read(text_input=text("x"), return_token_ids=flag(True), return_text_offsets=flag(True))
    parts = [SampleOutput("ab", None, [4, 5], [0, 1]), SampleOutput("", None, [], [])]
    found = [write_response(Response(call.returns, parts, [1, 2], first=first)) for first in (True, False)]
    values = {name: value.tolist() for name, value in found[0].items() if name != "text_output"}
    assert values == {"token_ids": [4, 5], "prompt_token_ids": [1, 2], "text_offsets": [0, 1]}
    assert {value.dtype for name, value in found[0].items() if name != "text_output"} == {np.dtype(np.int32)}
    assert "prompt_token_ids" not in found[1]


ASKED = {"text_input": text("x"), "return_logprobs": flag(True), "return_cumulative_logprob": flag(True)}


def logprobs_of(call, values, sums, **options):
    parts = [
        SampleOutput("", None, [], values={} if one is None else {"logprobs": one}, cumulative_logprob=total)
        for one, total in zip(values, sums, strict=True)
    ]
    outputs = write_response(Response(call.returns, parts, [1], **options))
    assert all(outputs[name].dtype == NUMPY_TYPES[OUTPUTS[name].data_type] for name in outputs)
    return [json.loads(one) for one in outputs["logprobs"]], outputs["cumulative_logprob"].tolist()


def test_logprobs_are_formatted_like_the_vllm_backend():
    tokens = [(TokenLogprob(7, -2.5, 3), TokenLogprob(300, -0.5, 1)), (TokenLogprob(8, -0.25, 1),)]
    spelled, sums = logprobs_of(read(**ASKED), [tokens, []], [-2.75, 0.0], token_text=lambda token: f"é{token}")
    assert spelled == [
        [
            {
                "7": {"logprob": -2.5, "rank": 3, "decoded_token": "é7"},
                "300": {"logprob": -0.5, "rank": 1, "decoded_token": "é300"},
            },
            {"8": {"logprob": -0.25, "rank": 1, "decoded_token": "é8"}},
        ],
        [],
    ]
    assert list(spelled[0][0]) == ["7", "300"]
    assert sums == [-2.75, 0.0]


def test_logprobs_are_null_without_the_sampling_parameter():
    assert logprobs_of(read(**ASKED), [None, None], [-1.5, -2.5]) == ([None, None], [-1.5, -2.5])
