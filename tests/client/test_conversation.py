"""Sessions of the client: which turn starts and ends one, and turns that meet a busy session."""

import pytest

from paged_client import conversation
from paged_client.conversation import SESSION_BUSY, SESSION_NOT_FOUND, Conversation
from paged_client.types import Completion, PagedError

BUSY = PagedError("INVALID_ARGUMENT", f"sequence_id=5: {SESSION_BUSY}")
EXPIRED = PagedError("INVALID_ARGUMENT", f"sequence_id=5: {SESSION_NOT_FOUND}")
LATE = PagedError("DEADLINE_EXCEEDED", "no answer")


class FakeClient:
    """Ends the next turns with these errors, or None for an answer, and all later ones with an answer."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.requests = []

    def generate(self, prompt=None, *, messages=None, **parameters):
        self.requests.append(parameters)
        if error := self.outcomes.pop(0) if self.outcomes else None:
            raise error
        return Completion("a", "stop", 1, 1)


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch):
    monkeypatch.setattr(conversation, "RETRY_INTERVAL", 0)


def starts(client):
    return [parameters.get("sequence_start") for parameters in client.requests]


def test_a_cancelled_first_turn_does_not_start_the_session():
    class CancelledStream:
        completion = Completion("", "cancelled", 1, 0)

    class Client(FakeClient):
        def stream(self, prompt=None, *, messages=None, **parameters):
            self.requests.append(parameters)
            return CancelledStream()

    client = Client()
    talk = Conversation(client, {})
    talk.stream("x")
    talk.generate("y")
    assert starts(client) == [True, True]


def test_only_the_first_turn_starts_the_session_and_leaving_ends_it():
    client = FakeClient()
    with Conversation(client, {"max_tokens": 3, "cache_salt": "s"}) as talk:
        talk.generate("x")
        talk.generate("y", max_tokens=4)
    first, second, end = client.requests
    own = {"sequence_id": talk.sequence_id, "cache_salt": "s"}
    assert first == own | {"sequence_start": True, "max_tokens": 3}
    assert second == own | {"sequence_start": False, "max_tokens": 4}
    assert end == own | {"sequence_end": True}


def test_a_failed_first_turn_is_started_again_and_needs_no_end():
    client = FakeClient(LATE, LATE)
    talk = Conversation(client, {})
    for _ in range(2):
        with pytest.raises(PagedError, match="no answer"):
            talk.generate("x")
    talk.close()
    assert starts(client) == [True, True]


def test_a_session_still_busy_with_a_failed_turn_is_retried():
    client = FakeClient(None, LATE, BUSY, BUSY)
    talk = Conversation(client, {})
    talk.generate("x")
    with pytest.raises(PagedError, match="no answer"):
        talk.generate("y")
    assert talk.generate("y").text == "a"
    assert starts(client) == [True, False, False, False, False]


def test_a_session_busy_with_another_turn_is_an_error():
    client = FakeClient(None, BUSY)
    talk = Conversation(client, {})
    talk.generate("x")
    with pytest.raises(PagedError, match=SESSION_BUSY):
        talk.generate("y")
    assert len(client.requests) == 2


def test_retries_end_after_a_time(monkeypatch):
    monkeypatch.setattr(conversation, "RETRY_SECONDS", 0)
    talk = Conversation(FakeClient(LATE, BUSY), {})
    for message in ("no answer", SESSION_BUSY):
        with pytest.raises(PagedError, match=message):
            talk.generate("x")


def test_an_expired_session_has_ended():
    with Conversation(FakeClient(None, EXPIRED), {}) as talk:
        talk.generate("x")


def converse(client, error=None):
    with Conversation(client, {}) as talk:
        talk.generate("x")
        if error:
            raise error


@pytest.mark.parametrize(("own", "raised"), [(None, PagedError), (KeyError("own"), KeyError)])
def test_a_failed_end_does_not_hide_the_callers_error(own, raised):
    with pytest.raises(raised):
        converse(FakeClient(None, LATE), own)
