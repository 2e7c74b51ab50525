"""The formats of the two kinds of models in front of the engine."""

import pytest

from paged_backend.trtllm.interfaces import create_interface
from paged_backend.trtllm.tensors import CORE, INPUTS, LLMAPI
from tests.support.pb_utils import Sent


def test_only_the_llm_api_drops_the_parameter_of_its_own_client():
    given = {"Streaming": True, "timeout": 5}
    assert create_interface(CORE).parameters(given) == given
    assert create_interface(LLMAPI).parameters(given) == {"timeout": 5}


@pytest.mark.parametrize("name", INPUTS)
def test_a_stop_is_confirmed_by_an_empty_response_or_an_error(name):
    client = Sent()
    create_interface(name).confirm_stop(client.channel())
    error = "CANCELLED: the requests with this id are being stopped" if name == LLMAPI else None
    assert client.the_only() == ({}, error, True)
