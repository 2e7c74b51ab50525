"""The connections between rank 0 and the other ranks."""

import socket
import struct
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait

import pytest

from paged_backend.distributed import links
from paged_backend.distributed.links import LinkListener, Meeting, connect, hang_up
from tests.support.waiting import WAIT, until

SECRET = b"secret of the ranks"


@pytest.fixture
def listener():
    found = LinkListener("127.0.0.1", SECRET, b"begin")
    yield found
    found.close()


def join(listener, rank, secret=SECRET):
    return connect(listener.meeting, secret, rank, WAIT)


def test_ranks_are_found_in_any_order(listener):
    made, seen = [], {}

    def arrive():
        for rank in (2, 2, 1):
            link, start = join(listener, rank)
            assert start == b"begin"
            made.append(link)
            until(lambda: 2 in seen, "rank 2")  # else the second connection may be the first that is found

    thread = threading.Thread(target=arrive)
    thread.start()
    found = listener.accept(2, seen.update)
    thread.join()
    assert sorted(found) == [1, 2]
    made[0].send_bytes(b"from 2")
    made[2].send_bytes(b"from 1")
    assert [found[rank].recv_bytes() for rank in (1, 2)] == [b"from 1", b"from 2"]
    assert made[1].recv_bytes() == b"rank 2 has joined from 127.0.0.1 already; 127.0.0.1 is refused"
    made[0].close()
    with pytest.raises(EOFError):
        found[2].recv_bytes()


def test_second_process_of_a_rank_is_refused_after_all_ranks_are_found(listener):
    first, _ = join(listener, 1)
    found = listener.accept(1, lambda found: None)
    second, _ = join(listener, 1)
    assert second.poll(WAIT), "no refusal"
    assert second.recv_bytes() == b"rank 1 has joined from 127.0.0.1 already; 127.0.0.1 is refused"
    for end in (first, second, *found.values()):
        end.close()


def test_other_addresses_of_the_machine_are_not_listened_at(listener):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.meeting.port))


def test_strangers_are_refused_and_delay_nobody(listener, caplog):
    silent = socket.create_connection(listener.meeting)
    guesser = socket.create_connection(listener.meeting)
    nonce = guesser.recv(64)
    guesser.sendall(struct.pack("<I32s32s", 1, nonce, nonce))
    guesser.settimeout(WAIT)
    assert guesser.recv(64) == b""  # and has learned nothing but the nonce
    with pytest.raises(ConnectionRefusedError, match="their secrets differ"):
        join(listener, 1, b"another secret")
    until(lambda: caplog.text.count("it does not know the secret of the ranks") == 2, "two warnings")
    link, _ = join(listener, 1)
    assert list(listener.accept(1, lambda found: None)) == [1]
    for end in (silent, guesser, link):
        end.close()


def test_many_silent_or_slow_strangers_keep_no_rank_out(listener, monkeypatch):
    monkeypatch.setattr(links, "MAX_STRANGERS", 4)
    monkeypatch.setattr(links, "HELLO_SECONDS", 2 * WAIT)  # too long for this test: only their number closes them
    strangers = [socket.create_connection(listener.meeting, WAIT) for _ in range(6)]
    for one in strangers:
        one.recv(64)  # the nonce
    assert [one.recv(64) for one in strangers[:2]] == [b"", b""]
    link, _ = join(listener, 1)
    assert list(listener.accept(1, lambda found: None)) == [1]
    for end in (*strangers, link):
        end.close()


def test_slow_stranger_is_refused_in_time(monkeypatch, caplog):
    monkeypatch.setattr(links, "HELLO_SECONDS", 0.5)
    listener = LinkListener("127.0.0.1", SECRET, b"begin")
    with socket.create_connection(listener.meeting, WAIT) as slow:
        slow.recv(64)
        with suppress(OSError):  # it is closed
            for _ in range(60):  # each part arrives in time, and all of them would after six seconds
                slow.sendall(bytes(1))
                time.sleep(0.1)
        until(lambda: "it is too slow" in caplog.text or "timed out" in caplog.text, "the refusal")
    listener.close()


def test_nobody_can_play_rank_0():
    """A stranger that listens at its port gets no proof that it could use, and its options are not believed."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer():
            with stranger.accept()[0] as end:
                end.sendall(bytes(32))
                hello = end.recv(68)
                end.sendall(hello[36:] + struct.pack("<I", 2) + b"{}")  # the rank's own proof

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            connect(Meeting(*stranger.getsockname()), SECRET, 1, WAIT)
        thread.join()


def test_thread_that_waits_notices_the_end_of_a_link(listener):
    made = []
    thread = threading.Thread(target=lambda: made.append(join(listener, 1)[0]))
    thread.start()
    link = listener.accept(1, lambda found: None)[1]
    thread.join()
    waiting = threading.Thread(target=lambda: wait([link]))
    waiting.start()
    hang_up(link)
    waiting.join()
    for side in (link, made[0]):
        with pytest.raises(EOFError):
            side.recv_bytes()


def test_waiting_can_be_given_up(listener):
    def give_up(found):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        listener.accept(1, give_up)


def test_rank_0_that_cannot_be_reached_is_an_error(listener):
    listener.close()
    with pytest.raises(OSError, match="Connection refused"):
        connect(listener.meeting, SECRET, 1, 0)
