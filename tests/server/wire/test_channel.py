"""A request of Triton's Python backend, and the responses to it."""

import weakref
from threading import Thread
from types import SimpleNamespace

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server.wire.channel import ServerChannel
from tests.support.in_process import WAIT
from tests.support.pb_utils import PB_UTILS
from tests.support.streams import Client


def test_polling_does_not_wait_for_a_send_in_progress():
    """A request is not polled after its final response either, as the server has dropped it."""
    client = Client(1)
    client.may_send.clear()
    client.cancelled = True
    channel = ServerChannel(PB_UTILS, SimpleNamespace(get_response_sender=lambda: client))
    sending = Thread(target=channel.send, args=[{}], kwargs={"final": True})
    sending.start()
    assert client.sending.wait(WAIT)
    assert not channel.is_cancelled()
    client.may_send.set()
    sending.join(WAIT)
    assert channel.closed and not channel.is_cancelled()
    channel.fail(RequestError(ErrorCode.INTERNAL, "too late"))
    with pytest.raises(AssertionError, match="after FINAL"):
        channel.send({}, final=False)
    assert client.got.qsize() == 1


def test_the_request_object_is_released_with_the_final_response():
    """Otherwise garbage collection after the server has exited could crash the process."""

    class Request(SimpleNamespace):
        pass

    request = Request(get_response_sender=lambda: Client(1))
    gone = weakref.ref(request)
    channel = ServerChannel(PB_UTILS, request)
    channel.itself = channel
    del request
    channel.send({}, final=False)
    assert gone()
    channel.send({}, final=True)
    assert not gone()
