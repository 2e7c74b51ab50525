"""Sessions: turns, expiry, and limits."""

import json
import math
from contextlib import ExitStack

import pytest

from paged_backend.api.errors import RequestError
from paged_backend.server.prompts.encoder import EncodedPrompt
from paged_backend.server.prompts.sessions import SessionName, Sessions
from tests.support.callers import Caller, serving
from tests.support.families import HYBRID_FAMILIES
from tests.support.in_process import byte_tokenizer, save_tiny

NAME = SessionName("", 7)
MANY = (1,) * 200_000  # tokens: 0.76 MiB
HELLO = EncodedPrompt([1], messages='[{"role":"user","content":"hello"}]')


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def unpinned():
    return []


@pytest.fixture
def sessions(clock, unpinned):
    return Sessions(10, 2, unpinned.append, clock, max_mib=1)


def begun(sessions, name=NAME, tokens=(1, 2, 3), **flags):
    turn = sessions.begin(name, **{"start": True, "end": False} | flags)
    turn.finish(list(tokens), {"content": "text"})
    return turn


def rejection(sessions, name=NAME, **flags):
    with pytest.raises(RequestError) as caught:
        sessions.begin(name, **{"start": False, "end": False} | flags)
    return str(caught.value)


def test_a_turn_continues_the_previous_one(sessions):
    begun(sessions)
    assert sessions.begin(NAME, start=False, end=False).earlier(chat=False).tokens.tolist() == [1, 2, 3]


def test_messages_and_replies_are_remembered(sessions):
    turn = sessions.begin(NAME, start=True, end=False)
    turn.add_prompt(HELLO)
    turn.finish([], {"content": "hi"})
    earlier = sessions.begin(NAME, start=False, end=False).earlier(chat=True)
    said = [message for part in earlier.messages for message in json.loads(part)]
    assert said == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    assert earlier.num_chars == sum(map(len, earlier.messages))


def test_a_session_cannot_mix_text_and_messages(sessions):
    begun(sessions)
    turn = sessions.begin(NAME, start=False, end=False)
    with pytest.raises(RequestError, match="sequence_id=7: was begun with text_input"):
        turn.earlier(chat=True)
    turn.undo()
    other = sessions.begin(SessionName("", 8), start=True, end=False)
    other.add_prompt(HELLO)
    other.finish([], {"content": "hi"})
    with pytest.raises(RequestError, match="sequence_id=8: was begun with messages"):
        sessions.begin(SessionName("", 8), start=False, end=False).earlier(chat=False)


def test_an_unknown_session_is_rejected(sessions):
    assert rejection(sessions).startswith("INVALID_ARGUMENT: sequence_id=7: no such session")


def test_sessions_of_different_salts_are_separate(sessions):
    begun(sessions, SessionName("tenant", 7))
    assert "no such session" in rejection(sessions, SessionName("", 7))


def test_a_concurrent_turn_is_rejected(sessions):
    turn = sessions.begin(NAME, start=True, end=False)
    assert "UNAVAILABLE: sequence_id=7: its previous turn is still running" in rejection(sessions)
    assert "still running" in rejection(sessions, start=True)
    turn.finish([1], {})
    sessions.begin(NAME, start=False, end=False)


def test_an_expired_session_is_rejected_and_unpinned(sessions, clock, unpinned):
    begun(sessions)
    clock.now = 9.9
    assert sessions.next_expiry == 10
    begun(sessions, start=False)
    clock.now = 19.8
    assert sessions.next_expiry == pytest.approx(19.9)
    sessions.expire()
    assert unpinned == []
    clock.now = 19.9
    sessions.expire()
    assert unpinned == [NAME]
    assert sessions.next_expiry == math.inf
    assert "expired after session_ttl=10 seconds" in rejection(sessions)


def test_a_session_does_not_expire_during_a_turn(sessions, clock, unpinned):
    turn = sessions.begin(NAME, start=True, end=False)
    clock.now = 100
    sessions.expire()
    assert unpinned == []
    assert sessions.next_expiry == math.inf
    turn.finish([1], {})
    assert sessions.next_expiry == 110


def test_sequence_end_removes_the_session(sessions, unpinned):
    begun(sessions)
    begun(sessions, start=False, end=True)
    assert unpinned == [NAME]
    assert "no such session" in rejection(sessions)


def test_a_failed_turn_restores_the_session(sessions, unpinned):
    begun(sessions)
    for flags in ({}, {"end": True}):
        sessions.begin(NAME, **{"start": False, "end": False} | flags).undo()
    assert unpinned == []
    assert sessions.begin(NAME, start=False, end=False).earlier(chat=False).tokens.tolist() == [1, 2, 3]


def test_a_failed_first_turn_removes_the_session(sessions, unpinned):
    sessions.begin(NAME, start=True, end=False).undo()
    assert unpinned == [NAME]
    assert "no such session" in rejection(sessions)


def test_sequence_start_replaces_the_session(sessions, unpinned):
    begun(sessions)
    assert sessions.begin(NAME, start=True, end=False).earlier(chat=False).tokens == ()
    assert unpinned == [NAME]


def test_sessions_beyond_max_sessions_are_rejected(sessions, clock):
    begun(sessions, SessionName("", 1))
    begun(sessions, SessionName("", "two"))
    assert "UNAVAILABLE: sequence_id=7: max_sessions=2 are open" in rejection(sessions, start=True)
    clock.now = 10
    begun(sessions)
    assert sessions.count == 1


def test_a_failed_start_restores_the_replaced_session(sessions, clock):
    begun(sessions)
    clock.now = 5
    sessions.begin(NAME, start=True, end=False).undo()
    assert sessions.count == 1
    assert sessions.next_expiry == 15
    assert sessions.begin(NAME, start=False, end=False).earlier(chat=False).tokens.tolist() == [1, 2, 3]


def full(sessions):
    """Return whether another large session is rejected."""
    turn = sessions.begin(SessionName("", 8), start=True, end=False)
    try:
        turn.add_prompt(EncodedPrompt(MANY))
    except RequestError as error:
        return "UNAVAILABLE: sequence_id=8: its 800000 bytes" in str(error)
    finally:
        turn.undo()
    return False


def test_stored_bytes_are_counted_until_the_session_is_removed(sessions, clock):
    assert not full(sessions)
    begun(sessions, tokens=MANY)
    assert full(sessions)
    begun(sessions, start=False, end=True)
    assert not full(sessions)
    begun(sessions, tokens=MANY)
    clock.now = 10
    assert not full(sessions)
    begun(sessions, tokens=MANY)
    begun(sessions)  # again
    assert not full(sessions)


def test_a_turn_reserves_bytes_once_its_size_is_known(sessions):
    turn = sessions.begin(NAME, start=True, end=False)
    turn.add_prompt(EncodedPrompt(MANY))
    assert full(sessions)
    turn.undo()
    assert not full(sessions)
    turn.add_prompt(EncodedPrompt(MANY))  # it was cancelled while its prompt was tokenized
    assert not full(sessions)
    ending = sessions.begin(NAME, start=True, end=True)
    ending.add_prompt(EncodedPrompt(MANY))
    assert not full(sessions)


def test_a_failed_start_keeps_the_bytes_of_the_replaced_session(sessions):
    begun(sessions, tokens=MANY)
    sessions.begin(NAME, start=True, end=False).undo()
    assert full(sessions)


@pytest.fixture
def served(tiny):
    """Return a function that takes a turn in a session of a service with these options.

    The messages contain characters that the template ignores.
    """

    def serve(**options):
        server = stack.enter_context(serving(tiny[0], **options))
        server.service._assembly.loaded.tokenizer.chat_template = "{{ messages[-1].content }}"

        def turn(sequence_id, ignored, salt="", **flags):
            said = [{"role": "user", "content": "hi", "name": "y" * ignored}]
            sampling = json.dumps({"max_tokens": 1, "cache_salt": salt})
            caller = Caller(messages=json.dumps(said), sampling_parameters=sampling)
            caller.parameters = lambda: json.dumps({"sequence_id": sequence_id} | flags)
            server.service.submit(caller)
            return caller

        return turn

    with ExitStack() as stack:
        yield serve


def test_a_tenant_cannot_keep_others_out(sessions, unpinned, clock):
    """The oldest idle session of the tenant with the most makes room, down to an equal share."""
    greedy = [SessionName("greedy", number) for number in range(2)]
    for name in greedy:
        begun(sessions, name)
        clock.now += 1
    assert "max_sessions=2 are open" in rejection(sessions, SessionName("greedy", 2), start=True)
    begun(sessions, SessionName("other", 0))
    assert unpinned == [greedy[0]]
    assert "removed to make room for another cache_salt" in rejection(sessions, greedy[0])
    assert "max_sessions=2 are open" in rejection(sessions, SessionName("third", 0), start=True)
    assert "max_sessions=2 are open" in rejection(sessions, SessionName("other", 1), start=True)
    assert sessions.begin(greedy[1], start=False, end=False)


def test_a_session_with_a_turn_in_progress_is_kept(sessions):
    for number in range(2):
        sessions.begin(SessionName("greedy", number), start=True, end=False)
    assert "max_sessions=2 are open" in rejection(sessions, SessionName("other", 0), start=True)


def test_a_tenant_cannot_take_all_memory_of_sessions(sessions, unpinned):
    """One that stores more makes room for one that stores less, not the other way round."""
    greedy, other = SessionName("greedy", 0), SessionName("other", 0)
    begun(sessions, greedy, tokens=MANY)
    turn = sessions.begin(other, start=True, end=False)
    turn.add_prompt(EncodedPrompt(MANY[::2]))
    assert unpinned == [greedy]
    turn.finish(MANY[: len(MANY) // 2], {})
    turn = sessions.begin(greedy, start=True, end=False)
    with pytest.raises(RequestError, match="max_sessions_mib=1"):
        turn.add_prompt(EncodedPrompt(MANY))


def test_max_sessions_mib_limits_all_sessions(served):
    turn = served(max_sessions_mib=1)
    assert turn(1, 600_000, sequence_start=True).all()
    rejected = turn(2, 600_000, sequence_start=True).rejection()
    assert "UNAVAILABLE: sequence_id=2: its 600" in rejected and "max_sessions_mib=1" in rejected
    assert turn(2, 600_000, sequence_start=True, sequence_end=True).all()  # it is not stored
    assert turn(1, 100, sequence_end=True).all()
    assert turn(2, 600_000, sequence_start=True).all()


def test_max_json_chars_limits_a_session(served):
    turn = served(max_json_chars=500)
    assert turn(1, 150, sequence_start=True).all()
    assert turn(1, 150).all()
    assert 'characters": must be at most 500 characters (max_json_chars)' in turn(1, 150).rejection()
    assert turn(1, 0).all()  # it is unchanged


def test_max_tenant_sessions_applies_per_tenant(served):
    turn = served(max_tenant_sessions=1)
    for salt in ("", "one"):
        assert turn(1, 0, salt, sequence_start=True).all()
        rejected = turn(2, 0, salt, sequence_start=True).rejection()
        assert "UNAVAILABLE: sequence_id=2: max_tenant_sessions=1 of this cache_salt are open; end one" in rejected
        assert turn(1, 0, salt, sequence_start=True).all()  # again
    assert turn(1, 0, sequence_end=True).all()
    assert turn(2, 0, sequence_start=True).all()


def test_sessions_of_models_with_recurrent_layers(tmp_path):
    """A turn gets the reply to the whole conversation, and continues from the state that the session has kept."""
    save_tiny(HYBRID_FAMILIES["lfm2"](), tmp_path)
    letters = byte_tokenizer()("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    sampling = json.dumps({"temperature": 0, "max_tokens": 6, "allowed_token_ids": letters})

    def ask(text, **parameters):
        caller = Caller(text_input=text, sampling_parameters=sampling)
        caller.parameters = lambda: json.dumps(parameters)
        server.service.submit(caller)
        (outputs,) = caller.all()
        return outputs["text_output"][0].decode()[-6:]  # the output follows the prompt

    with serving(tmp_path, max_model_len=64) as server:
        first = ask("abc", sequence_id=7, sequence_start=True)
        pinned = server.service._assembly.scheduler.stats
        state = server.service._assembly.limits.layout.kinds[-1].pages
        assert pinned.blocks_used == pinned.blocks_pinned == 2 + state
        second = ask("def", sequence_id=7)
        assert server.service._assembly.scheduler.stats.cached_tokens == 8
        assert (ask("abc"), ask(f"abc{first}def")) == (first, second)
