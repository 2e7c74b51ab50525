"""Requests and responses over gRPC."""

import json

import pytest
from tritonclient.grpc import service_pb2

from paged_client import grpc_wire, http_wire
from paged_client.wire import request_values
from tests.support.fake_servers import grpc_inputs, grpc_response


@pytest.mark.parametrize("prompt", ["hé\0", [5, 2**31 - 1]])
def test_both_protocols_encode_the_same_values(prompt):
    values = request_values(prompt, None, {"stop": "é", "return_token_ids": True}, stream=True)
    request = grpc_wire.infer_request("m", values, "id-1")
    assert (request.model_name, request.id) == ("m", "id-1")
    assert grpc_inputs(request) == values
    assert json.loads(http_wire.encode_body(values, "id-1")) == {"id": "id-1", **values}
    assert "id" not in json.loads(http_wire.encode_body(values, ""))


def test_fields_of_a_grpc_response():
    outputs = {"text_output": "é", "finish_reason": "None", "num_input_tokens": 4, "num_output_tokens": 2}
    outputs |= {"logprobs": "null", "cumulative_logprob": -0.5}
    response = service_pb2.ModelStreamInferResponse(infer_response=grpc_response(outputs))
    assert grpc_wire.read_fields(response) == {name: [value] for name, value in outputs.items()}


def test_scalar_token_count_is_accepted():
    response = grpc_response({"text_output": "a", "num_input_tokens": 4})
    del response.outputs[1].shape[:]
    message = service_pb2.ModelStreamInferResponse(infer_response=response)
    assert grpc_wire.read_fields(message) == {"text_output": ["a"], "num_input_tokens": [4]}
