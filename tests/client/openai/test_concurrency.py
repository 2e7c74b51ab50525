"""Clients that disconnect."""

import json
import socket

import pytest

from tests.support.gateway import PROMPT, WAIT, gateway
from tests.support.waiting import until


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [[], ["a"]])
def test_disconnect_cancels_the_request(front, fake, says, stream, said):
    """Before and after the first delta, with streaming and without."""
    fake.asked.clear()
    fake.left.clear()
    body = json.dumps(PROMPT | {"stream": stream}).encode()
    with says(say=said, hold=True), socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert fake.asked.wait(WAIT)
        if stream and said:
            assert connection.recv(1), "the stream has begun"
        connection.close()
        assert fake.left.wait(WAIT), "the server never heard of it"


def test_disconnect_before_the_body_is_counted(fake):
    with gateway(fake.url) as front:
        with socket.create_connection(("127.0.0.1", front.port), WAIT) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        gone = 'paged_openai_requests_total{model="",route="/v1/completions",status="499"}'
        until(lambda: front.metrics().get(gone) == 1, "the count of the request")
