"""Token ids through a real Triton server, with tritonclient and the client library."""

import json

import numpy as np
import pytest

from paged_client import Client
from tests.support.in_process import byte_tokenizer
from tests.support.triton import post, raw_stream

TOKENIZER = byte_tokenizer()
TEXT = "The sea is"
IDS = TOKENIZER.encode(TEXT)
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
ASKED = {"return_token_ids": True, "return_text_offsets": True, "return_num_output_tokens": True}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_in_and_out(tiny_server, stream):
    with raw_stream(tiny_server) as connection:
        connection.send(input_ids=np.array(IDS, np.int32), sampling_parameters=SAMPLED, stream=stream, **ASKED)
        pieces = connection.all()
        connection.send(text_input=TEXT, sampling_parameters=SAMPLED, exclude_input_in_output=True, **ASKED)
        (whole,) = connection.all()
    ids = [token for piece in pieces for token in piece.outputs["token_ids"]]
    assert ids == whole.outputs["token_ids"]
    assert [offset for piece in pieces for offset in piece.outputs["text_offsets"]] == whole.outputs["text_offsets"]
    assert pieces[0].outputs["prompt_token_ids"] == IDS
    assert not any("prompt_token_ids" in piece.outputs for piece in pieces[1:])


def test_token_id_lists_over_the_generate_endpoint(tiny_server):
    status, body = post(tiny_server, {"input_ids": IDS, **SAMPLED, **ASKED})
    answer = json.loads(body)
    assert (status, answer["prompt_token_ids"], len(answer["token_ids"])) == (200, IDS, 12)
    status, body = post(tiny_server, {"input_ids": [320], **SAMPLED})
    assert status == 400
    assert "input_ids[0]=320: must be 0..319" in body


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("stream", [False, True])
def test_scoring_and_echoing_a_prompt_without_generation(tiny_server, protocol, stream):
    """The response includes outputs without elements."""
    wanted = {
        "max_tokens": 0,
        "echo": True,
        "prompt_logprobs": 2,
        "return_token_ids": True,
        "return_text_offsets": True,
    }
    url = {"grpc": tiny_server.grpc_url, "http": tiny_server.http_url}[protocol]
    with Client(url, protocol=protocol) as client:
        if stream:
            with client.stream(TEXT, **wanted) as answers:
                list(answers)
            answer = answers.completion
        else:
            answer = client.generate(TEXT, **wanted)
    assert (answer.text, answer.finish_reason, answer.num_output_tokens) == (TEXT, "length", 0)
    assert (answer.token_ids, answer.text_offsets) == ((), ())
    assert answer.prompt_text_offsets == tuple(range(len(TEXT)))
    first, *others = answer.prompt_logprobs
    assert first is None
    assert [own.token_id for own, *_ in others] == IDS[1:]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_token_ids_in_the_client_library(tiny_server, protocol):
    url = {"grpc": tiny_server.grpc_url, "http": tiny_server.http_url}[protocol]
    asked = {"return_token_ids": True, "return_text_offsets": True, **SAMPLED}
    with Client(url, protocol=protocol) as client:
        whole = client.generate(IDS, n=2, **asked)
        with client.stream(TEXT, **asked) as stream:
            deltas = list(stream)
        assert client.generate(TEXT, **SAMPLED).token_ids is None
    assert whole.prompt_token_ids == stream.completion.prompt_token_ids == tuple(IDS)
    assert [len(one.token_ids) for one in (whole, *whole.others)] == [12, 12]
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert stream.completion.text_offsets == whole.text_offsets
    assert all(len(delta.token_ids) == delta.num_output_tokens for delta in deltas)
