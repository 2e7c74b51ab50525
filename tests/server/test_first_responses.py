"""Empty first responses."""

import json

from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.service_calls import RETURNED


def test_a_waiting_stream_gets_an_empty_first_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    parameters = {"max_tokens": 2, "prompt_logprobs": 1}
    caller = Caller(text_input="abcd", stream=True, sampling_parameters=json.dumps(parameters), **RETURNED)
    service.submit(caller)
    gate.wait()
    assert caller.empty()
    clock.ahead += 6
    outputs, error, last = caller.get(timeout=WAIT)
    assert (outputs["text_output"], outputs["num_output_tokens"], error, last) == ([b""], [0], None, False)
    assert "prompt_logprobs" not in outputs
    gate.open()
    rest = caller.all()
    assert ["prompt_logprobs" in part for part in rest] == [True] + [False] * (len(rest) - 1)
    assert sum(part["num_output_tokens"][0] for part in rest) == 2


def test_a_stream_with_an_early_token_gets_no_empty_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    gate.open()
    caller = Caller(text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 2}', **RETURNED)
    service.submit(caller)
    assert all(part["num_output_tokens"][0] for part in caller.all())
