"""The formats of the two kinds of models in front of the engine."""

import re

import numpy as np
import pytest

from paged_backend.api.errors import RequestError
from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.tensors import ENSEMBLE, INPUTS, LLMAPI
from tests.support.pb_utils import Sent


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, None),
        ({"stream": [[True]]}, "stream=true: Streaming is only supported in decoupled mode. Set `decoupled: true` in"),
        ({"num_return_sequences": [[2]]}, "num_return_sequences=2: must be 1. Several responses are only supported in"),
        ({"text_input": [[b"a"], [b"b"]], "max_tokens": [[4], [4]]}, "the request has 2 rows; must have 1. Several"),
    ],
)
def test_a_model_that_is_not_decoupled_rejects_several_responses(changes, error):
    tensors = {"text_input": [[b"a"]], "max_tokens": [[4]]} | changes
    tensors = {name: np.array(value, object if name == "text_input" else None) for name, value in tensors.items()}
    assert create_interface(ENSEMBLE).read(tensors)
    single = create_interface(ENSEMBLE, streams=False)
    if error is None:
        assert single.read(tensors)
    else:
        with pytest.raises(RequestError, match=re.escape(error)):
            single.read(tensors)


@pytest.mark.parametrize("name", INPUTS)
def test_a_stop_is_confirmed_by_an_empty_response_or_an_error(name):
    client = Sent()
    create_interface(name).confirm_stop(client.channel())
    error = "CANCELLED: the requests with this id are being stopped" if name == LLMAPI else None
    assert client.the_only() == ({}, error, True)
