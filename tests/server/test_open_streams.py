"""How open streams end: oversized responses, and errors of the engine."""

import json

import pytest

from paged_backend.server.stream import Stream
from tests.support.callers import Caller
from tests.support.in_process import WAIT
from tests.support.service_calls import (
    RETURNED,
    ask,
    finish,
    outcomes,
)


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_larger_than_max_response_mib_fails(serve, gate, streams, monkeypatch):
    """Triton buffers what a client does not read. 1,680 tokens with 20 logprobs each are 2 MB."""
    ended = outcomes(monkeypatch)
    service = serve(max_response_mib=1, num_gpu_blocks_override=512)
    gate.open()
    big = {"max_tokens": 240, "logprobs": 20, "n": 7, "temperature": 1, "ignore_eos": True}
    inputs = {"text_input": "abcd", "stream": streams, "return_logprobs": True, **RETURNED}
    caller = Caller(**inputs, sampling_parameters=json.dumps(big))
    service.submit(caller)
    error = None
    while error is None:
        _, error, last = caller.get(timeout=WAIT)
    assert last
    assert "UNAVAILABLE: its answer is larger than max_response_mib=1" in error
    assert finish(ask(service)) == ("length", 9)
    assert ended == ["refused", "length"]


def test_a_request_rejected_by_the_engine_is_not_logged_as_an_internal_error(serve, gate, monkeypatch):
    """An example is an invalid grammar. The outcome `error` is for internal errors."""
    ended = outcomes(monkeypatch)
    service = serve()
    gate.open()
    bad = Caller(text_input="abcd", sampling_parameters='{"regex": "("}')
    service.submit(bad)
    assert "INVALID_ARGUMENT: regex" in bad.rejection()
    monkeypatch.setattr(Stream, "take", lambda self, delta, when: 1 / 0)
    assert "INTERNAL: ZeroDivisionError" in ask(service).answer()
    assert ended == ["refused", "error"]
