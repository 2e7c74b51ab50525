"""How a stream ends: by an error, by the client, and by the server."""

import json
import threading

import pytest

from paged_client import Completion, Delta, PagedError
from tests.support.client_calls import texts
from tests.support.fake_servers import WAIT


def test_stream(client, fake):
    with client.stream(messages=[{"role": "user", "content": "x"}], say=["a", "b"]) as stream:
        assert stream.completion is None
        assert list(stream) == [Delta("a", 2, None), Delta("b", 2, "stop")]
        assert stream.completion == Completion("ab", "stop", 7, 4)
    assert json.loads(fake.requests[0]["messages"]) == [{"role": "user", "content": "x"}]
    assert fake.requests[0]["stream"] is True


@pytest.mark.parametrize("said", [[], ["a"]])
def test_error_before_or_after_the_first_delta(client, said):
    stream = client.stream("x", say=said, fail="INVALID_ARGUMENT: top_p=2: no")
    assert [next(stream).text for _ in said] == said
    with pytest.raises(PagedError, match="top_p=2: no") as raised:
        next(stream)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert stream.completion is None
    assert list(stream) == []  # an error is raised once


@pytest.mark.parametrize("said", [[], ["a"]])
def test_truncated_stream_is_an_error(client, said):
    with pytest.raises(PagedError) as raised:
        client.generate("x", say=said, cut=True)
    assert raised.value.code == "UNAVAILABLE"


def test_server_disconnects(client):
    stream = client.stream("x", say=["a"], vanish=True)
    assert next(stream).text == "a"
    with pytest.raises(PagedError) as raised:
        next(stream)
    assert raised.value.code == "UNAVAILABLE"


def test_leaving_the_with_block_cancels(client, fake):
    with client.stream("x", say=["a"], hold=True) as stream:
        assert next(stream).text == "a"
    assert fake.left.wait(WAIT)
    assert stream.completion == Completion("a", "cancelled", 7, 2)
    assert list(stream) == []


@pytest.mark.parametrize("said", [[], ["a"]])
def test_cancel_from_another_thread_wakes_the_reader(client, fake, said):
    stream = client.stream("x", say=said, hold=True)
    assert [next(stream).text for _ in said] == said

    def cancel():
        fake.asked.wait(WAIT)
        stream.cancel()

    threading.Thread(target=cancel).start()
    assert list(stream) == []
    assert fake.left.wait(WAIT)
    assert stream.completion.finish_reason == "cancelled"


def test_streams_of_one_client_are_independent(client, fake):
    held = client.stream("x", say=["held"], hold=True)
    assert next(held).text == "held"
    streams = [client.stream("x", say=[f"{i}a", f"{i}b"]) for i in range(20)]
    firsts = [next(stream).text for stream in streams]
    assert firsts == [f"{i}a" for i in range(20)]
    assert [texts(stream) for stream in streams] == [[f"{i}b"] for i in range(20)]
    held.cancel()
    assert fake.left.wait(WAIT)
