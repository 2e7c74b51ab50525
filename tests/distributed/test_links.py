"""The connections between rank 0 and the other ranks."""

import socket
import threading
from multiprocessing.connection import wait

import pytest

from paged_backend.distributed.links import LinkListener, Meeting, connect, hang_up


@pytest.fixture
def listener():
    found = LinkListener("127.0.0.1")
    yield found
    found.close()


def test_ranks_are_found_in_any_order_and_strangers_are_not(listener):
    meeting, made = listener.meeting, []

    def arrive():
        stranger = socket.create_connection((meeting.host, meeting.port))
        stranger.close()
        made.append(connect(Meeting(meeting.host, meeting.port, "wrong"), 1, 5))
        made.extend(connect(meeting, rank, 5) for rank in (2, 2, 1))

    thread = threading.Thread(target=arrive)
    thread.start()
    found = listener.accept(2, lambda found: None)
    thread.join()
    assert sorted(found) == [1, 2]
    made[1].send_bytes(b"from 2")
    made[3].send_bytes(b"from 1")
    assert [found[rank].recv_bytes() for rank in (1, 2)] == [b"from 1", b"from 2"]
    assert made[2].recv_bytes() == b"rank 2 has joined from 127.0.0.1 already; 127.0.0.1 is refused"
    made[1].close()
    with pytest.raises(EOFError):
        found[2].recv_bytes()


def test_thread_that_waits_notices_the_end_of_a_link(listener):
    made = []
    thread = threading.Thread(target=lambda: made.append(connect(listener.meeting, 1, 5)))
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
    meeting = listener.meeting
    listener.close()
    with pytest.raises(OSError, match="refused"):
        connect(meeting, 1, 0)
