"""Sessions of the asyncio client: which turn starts and ends one, and turns that meet a busy session."""

import asyncio

import pytest

from paged_client import async_conversation
from paged_client.async_conversation import AsyncConversation
from paged_client.conversation import SESSION_BUSY, SESSION_NOT_FOUND
from paged_client.types import Completion, PagedError

BUSY = PagedError("INVALID_ARGUMENT", f"sequence_id=5: {SESSION_BUSY}")
EXPIRED = PagedError("INVALID_ARGUMENT", f"sequence_id=5: {SESSION_NOT_FOUND}")
LATE = PagedError("DEADLINE_EXCEEDED", "no answer")


class FakeResponses:
    def __init__(self, error):
        self.error, self.cancelled = error, False

    async def next(self):
        if self.error:
            raise self.error
        return {"text_output": ["a"]}

    def cancel(self):
        self.cancelled = True


class FakeClient:
    """A client and its transport. Ends the next requests with these errors, or None for an answer."""

    must_stream = False

    def __init__(self, *outcomes):
        self.outcomes, self.sent, self.turns = list(outcomes), [], []

    def with_transport(self, wrap):
        self.transport = wrap(self)
        return self

    def open(self, values, request_id, timeout):
        self.sent.append(FakeResponses(self.outcomes.pop(0) if self.outcomes else None))
        return self.sent[-1]

    def close(self):
        pass

    async def generate(self, prompt=None, *, messages=None, **parameters):
        self.turns.append(parameters)
        await self.transport.open({}, "", None).next()
        return Completion("a", "stop", 1, 1)


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch):
    monkeypatch.setattr(async_conversation, "RETRY_INTERVAL", 0)


def test_only_the_first_turn_starts_the_session_and_leaving_ends_it():
    client = FakeClient()

    async def scenario():
        async with AsyncConversation(client, {"cache_salt": "s"}) as talk:
            await talk.generate("x")
            await talk.generate("y")
        return {"sequence_id": talk.sequence_id, "cache_salt": "s"}

    own = asyncio.run(scenario())
    assert client.turns == [
        own | {"sequence_start": True}, own | {"sequence_start": False}, own | {"sequence_end": True},
    ]  # fmt: skip


def test_a_session_still_busy_with_a_failed_turn_is_retried():
    client = FakeClient(LATE, BUSY, BUSY)

    async def scenario():
        talk = AsyncConversation(client, {})
        with pytest.raises(PagedError, match="no answer"):
            await talk.generate("x")
        return await talk.generate("x")

    assert asyncio.run(scenario()).text == "a"
    assert [one.cancelled for one in client.sent] == [False, True, True, False]
    assert [turn["sequence_start"] for turn in client.turns] == [True, True]


def test_a_session_busy_with_another_turn_is_an_error():
    client = FakeClient(BUSY)
    with pytest.raises(PagedError, match=SESSION_BUSY):
        asyncio.run(AsyncConversation(client, {}).generate("x"))
    assert len(client.sent) == 1


@pytest.mark.parametrize(("end", "raised"), [(EXPIRED, None), (LATE, "no answer")])
def test_only_an_expired_session_needs_no_end(end, raised):
    async def scenario():
        async with AsyncConversation(FakeClient(None, end), {}) as talk:
            await talk.generate("x")

    if raised:
        with pytest.raises(PagedError, match=raised):
            asyncio.run(scenario())
    else:
        asyncio.run(scenario())
