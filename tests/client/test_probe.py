"""The probe of a server."""

import pytest

from paged_client.probe import probe
from paged_client.types import PagedError


class FakeClient:
    """Raises the errors, one per request, and records the parameters. `map_error` is that of pool maps."""

    def __init__(self, *errors, map_error=None):
        self.errors, self.map_error, self.asked = list(errors), map_error, []

    def pool_map(self, **parameters):
        self.asked.append(parameters)
        if self.map_error:
            raise self.map_error

    def generate(self, prompt, **parameters):
        self.asked.append(parameters)
        if self.errors and (error := self.errors.pop(0)):
            raise error


def test_a_full_queue_counts_as_alive():
    probe(FakeClient(PagedError("UNAVAILABLE", "8 requests wait, the limit (max_queue_size)")), 1.0)


def test_the_priority_is_the_highest_that_the_server_allows():
    client = FakeClient(PagedError("INVALID_ARGUMENT", "priority=-9 must be -5..7 (min_priority)"))
    probe(client, 1.0)
    assert client.asked[1]["priority"] == -5


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED"])
def test_other_errors_are_raised(code):
    with pytest.raises(PagedError):
        probe(FakeClient(PagedError(code, "no")), 1.0)


def test_a_model_that_does_not_generate_is_asked_for_a_pool_map():
    refusal = PagedError("INVALID_ARGUMENT", "this model classifies prompts and generates no text")
    client = FakeClient(refusal)
    probe(client, 1.0)
    assert client.asked[1:] == [{"timeout": 1.0}]
    with pytest.raises(PagedError, match="the engine died"):
        probe(FakeClient(refusal, map_error=PagedError("INTERNAL", "the engine died")), 1.0)


def test_a_model_that_is_asleep_is_asked_for_a_pool_map():
    """It is not restarted, unless its engine loop does not answer."""
    asleep = PagedError("UNAVAILABLE", "the model is asleep; wake it with `paged wake`")
    client = FakeClient(asleep)
    probe(client, 1.0)
    assert client.asked[1:] == [{"timeout": 1.0}]
    with pytest.raises(PagedError, match="the engine died"):
        probe(FakeClient(asleep, map_error=PagedError("INTERNAL", "the engine died")), 1.0)
