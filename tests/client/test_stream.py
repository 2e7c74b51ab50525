"""Streams that are cancelled late, or dropped."""

import gc

from tests.support.client_calls import texts
from tests.support.fake_servers import WAIT


def test_dropping_the_stream_cancels(client, fake):
    for _ in client.stream("x", say=["a"], hold=True):
        break
    gc.collect()
    assert fake.left.wait(WAIT)


def test_cancelling_a_finished_stream_does_nothing(client):
    stream = client.stream("x", say=["a"])
    assert texts(stream) == ["a"]
    stream.cancel()
    assert stream.completion.finish_reason == "stop"
