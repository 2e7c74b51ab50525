"""Which instance of a model replaces another."""

import threading
from dataclasses import replace

import pytest

from paged_backend.server.local_listener import Listener
from paged_backend.server.successors import MAX_ATTEMPTS, Description, Successors
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack

pytestmark = pytest.mark.usefixtures("socket_directory")

OWN = Description("1/m_0_0", 100, "abc")


@pytest.fixture
def listen():
    made = []

    def start(description, model="m"):
        values = description.write() if isinstance(description, Description) else description
        made.append(Listener(model, print, description=values))
        return made[-1].name

    yield start
    for listener in made:
        listener.close()


def test_the_newest_instance_of_the_same_name_and_fingerprint_is_the_successor(listen):
    own = listen(OWN)
    successors = Successors("m", own, OWN)
    assert successors.find() is None
    for other in (
        replace(OWN, started=99),
        replace(OWN, started=101, instance="1/m_0_1"),
        replace(OWN, started=101, instance="2/m_0_0"),
        replace(OWN, started=101, fingerprint="abd"),
        None,
        {"instance": "1/m_0_0"},
    ):
        listen(other)
    listen(replace(OWN, started=101), model="other")
    assert successors.find() is None
    first = listen(replace(OWN, started=101))
    assert successors.find() == first
    second = listen(replace(OWN, started=102))
    assert successors.find() == second
    successors.exclude(second)
    assert successors.find() == first
    local_socket.remove(first)
    assert successors.find() is None


def test_an_instance_that_does_not_answer_is_asked_three_times(listen):
    successors, asked = Successors("m", "own", OWN), []
    end, _ = local_socket.listen("m")

    def refuse():
        while True:
            peer, _ = end.accept()
            asked.append(peer)
            peer.close()

    threading.Thread(target=refuse, daemon=True).start()
    for _ in range(5):
        assert successors.find() is None
    assert len(asked) == MAX_ATTEMPTS


@pytest.mark.parametrize("value", [None, [], {}, {"instance": "a", "started": 1.5, "fingerprint": "b"}])
def test_invalid_description_is_an_error_of_the_frame(value):
    with pytest.raises(FrameError):
        Description.read(value)


def test_an_instance_describes_itself_if_asked_to(listen):
    connection = Connection(local_socket.connect(listen(OWN)))
    frames = connection.frames()
    for value, answer in ((True, {"describe": OWN.write()}), (1, None), ("yes", None)):
        connection.send(pack({"id": 3, "describe": value}))
        found = next(frames)
        assert found.pop("id") == 3
        assert found == answer if isinstance(answer, dict) else found["error"]["code"] == "INVALID_ARGUMENT"
