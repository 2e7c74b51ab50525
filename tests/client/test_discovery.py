"""Finding the model of a server: over gRPC and HTTP, with a fake server."""

import pytest

from paged_client.connection_errors import UnreachableError
from paged_client.discovery import find_model
from paged_client.types import PagedError
from tests.support.fake_servers import SERVERS

OURS, OTHER = ["text_input", "pool_map"], ["INPUT0"]


@pytest.fixture(params=SERVERS)
def find(request):
    """A function that finds the model of a server with these models."""

    def make(models):
        with SERVERS[request.param]() as seen:
            seen.models = models
            return find_model(seen.url, request.param, 10)

    return make


@pytest.mark.parametrize(
    ("models", "found"),
    [
        ({"other": OTHER, "paged_llm": OURS}, "paged_llm"),
        ({"paged_llm": OURS, "second": OURS}, "paged_llm"),
        ({"ensemble": OTHER, "foo": OURS}, "foo"),
    ],
)
def test_the_model_of_this_engine_is_found(find, models, found):
    assert find(models) == found


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"b": OURS, "a": OURS}, "several models; choose one with --model: a, b"),
        ({"b": OTHER, "a": OTHER}, "does not serve this engine; its models: a, b"),
        ({}, "it has no model that is ready"),
        ({f"m{number:02}": OTHER for number in range(30)}, "m19 and 10 more"),
    ],
)
def test_no_model_or_several_are_an_error(find, models, message):
    with pytest.raises(PagedError, match=message) as caught:
        find(models)
    assert caught.value.code == "NOT_FOUND"


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_closed_port_is_unreachable(protocol):
    with pytest.raises(UnreachableError, match="nothing listens at localhost:9"):
        find_model("localhost:9", protocol)
