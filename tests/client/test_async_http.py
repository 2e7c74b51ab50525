"""Responses of the HTTP endpoints with asyncio."""

import asyncio
from types import SimpleNamespace

from paged_client.async_http import HttpResponses
from tests.support.fake_servers import WAIT


def test_cancel_between_reply_and_reader():
    """A reply that has arrived is closed even if the task that waits for it has not run yet."""

    async def scenario():
        loop = asyncio.get_running_loop()
        closed = loop.create_future()
        content = SimpleNamespace(readany=lambda: closed)
        reply = SimpleNamespace(status=200, content=content, close=lambda: closed.set_result(b""))

        async def post(body, timeout):
            loop.call_soon(responses.cancel)
            return reply

        responses = HttpResponses(SimpleNamespace(url="", post=post), b"", None)
        return await asyncio.wait_for(responses.next(), WAIT)

    assert asyncio.run(scenario()) is None
