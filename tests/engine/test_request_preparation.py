"""Request preparation: adapters and prefixes are loaded before a request reaches the inbox."""

from types import SimpleNamespace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.messages import AddRequest, EmitStats, StorePrefetched
from paged_backend.engine.request_preparation import RequestPreparation

ADAPTER = Adapter("a", b"a", 1, {})
BLOCKS = "blocks of the prompt"


def request(**sampling):
    return GenerateRequest(3, (1, 2), SamplingParams(**sampling), 0, frozenset())


def adapters(get):
    """Return a registry that loads adapters on the calling thread."""
    return SimpleNamespace(run=lambda load, *arguments: load(*arguments), get=get)


def prefix_tiers(*, has_prefix):
    def prefetch(request, deliver, done):
        deliver(BLOCKS)
        done(request)

    return SimpleNamespace(can_prefetch=lambda request: has_prefix, prefetch=prefetch)


def delivered(one, **parts):
    """Return the messages and the errors after a request was delivered."""
    posted, rejected = [], []
    reject = lambda key, error: rejected.append((key, error))  # noqa: E731
    RequestPreparation(posted.append, reject, parts.get("adapters"), parts.get("disk")).deliver(one)
    return posted, rejected


def test_request_without_adapter_or_prefix_is_posted_at_once():
    def get(name):
        raise AssertionError(name)

    one = request()
    parts = {"adapters": adapters(get), "disk": prefix_tiers(has_prefix=False)}
    assert delivered(one, **parts) == ([AddRequest(one)], [])
    assert delivered(one) == ([AddRequest(one)], [])


def test_request_is_posted_with_its_adapter_and_then_its_prefix():
    """Statistics follow each wait, as the request then counts as waiting."""
    parts = {"adapters": adapters({"a": ADAPTER}.get), "disk": prefix_tiers(has_prefix=True)}
    posted, rejected = delivered(request(lora_name="a"), **parts)
    assert [type(message) for message in posted] == [EmitStats, EmitStats, StorePrefetched, AddRequest]
    assert (posted[-1].request.adapter, posted[-2].prefetched, rejected) == (ADAPTER, BLOCKS, [])


@pytest.mark.parametrize(
    ("raised", "code", "reason"),
    [
        (RequestError(ErrorCode.INVALID_ARGUMENT, "no such adapter"), ErrorCode.INVALID_ARGUMENT, "no such adapter"),
        (OSError("disk"), ErrorCode.INTERNAL, "its adapter could not be loaded: OSError: disk"),
    ],
)
def test_adapter_that_cannot_be_loaded_rejects_the_request(raised, code, reason):
    def get(name):
        raise raised

    posted, ((key, error),) = delivered(request(lora_name="a"), adapters=adapters(get))
    assert posted == [EmitStats()]
    assert (key, error.code) == (3, code)
    assert reason in str(error)
