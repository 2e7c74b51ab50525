"""A service answers each request on its own."""

from tests.support.callers import Caller
from tests.support.service_calls import (
    outcomes,
)


def test_an_internal_error_while_reading_fails_only_that_request(serve, monkeypatch):
    """Triton's `execute` submits one request after the other, so `submit` must never raise."""
    ended, service = outcomes(monkeypatch), serve()
    before, broken, after = (Caller(text_input="abcd", sampling_parameters='{"max_tokens": 2}') for _ in range(3))
    broken.inputs = lambda: 1 / 0
    for caller in (before, broken, after):
        service.submit(caller)
    assert broken.rejection() == "Error generating stream: INTERNAL: ZeroDivisionError: division by zero"
    assert broken.empty()
    assert before.all() and after.all()
    assert sorted(ended)[0] == "error" and len(ended) == 3
