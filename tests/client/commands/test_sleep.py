"""`paged sleep` and `paged wake` with an engine of this machine that only records what it is asked."""

import pytest

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.model_memory import ReleasedMemory
from paged_backend.engine.sleep_mode import NOTHING, Transition
from paged_backend.server.connections.listener import Listener
from paged_client.cli import main
from tests.support.local_engine import socket_directory

__all__ = ["socket_directory"]
GIB = 1 << 30
ON_GPU = Transition(True, ReleasedMemory(pool=20 * GIB, weights=8 * GIB, graphs=GIB // 2), 1.25)
ON_CPU = Transition(True, ReleasedMemory(pool=2 * GIB, weights=0, graphs=0), 0.5)
pytestmark = pytest.mark.usefixtures("socket_directory")


class FakeSleepMode:
    """Gives one answer, or raises it, after reports of open requests."""

    def __init__(self, answer, reports=()):
        self.answer, self.reports, self.asked = answer, reports, []

    def sleep(self, timeout, report):
        self.asked.append(timeout)
        for count in self.reports:
            report(count)
        return self.wake()

    def wake(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def listening():
    """Return a function that opens the socket of an instance of a model."""
    opened = []

    def listen(mode, model="paged_llm"):
        opened.append(Listener(model, print, sleep_mode=mode))
        return mode

    yield listen
    for listener in opened:
        listener.drain(0)
        listener.close()


def test_progress_and_freed_bytes_are_printed(listening, capsys):
    mode = listening(FakeSleepMode(ON_GPU, [2, 2, 2, 1, 1]))
    assert main(["sleep", "--timeout", "5"]) == 0
    assert mode.asked == [5.0]
    printed = capsys.readouterr()
    assert printed.err == "waiting for 2 open requests\nwaiting for 1 open request\n"
    assert printed.out == (
        "paged_llm is asleep: freed 28.50 GiB in 1.25 s"
        " (KV cache 20.00 GiB, CUDA graphs 0.50 GiB; weights 8.00 GiB, moved to host memory)\n"
    )
    assert main(["wake"]) == 0
    assert capsys.readouterr().out == "paged_llm is awake: restored 28.50 GiB in 1.25 s\n"


def test_weights_of_a_cpu_stay(listening, capsys):
    listening(FakeSleepMode(ON_CPU), "other")
    assert main(["sleep", "--model", "other"]) == 0
    assert capsys.readouterr().out == (
        "other is asleep: freed 2.00 GiB in 0.50 s (KV cache; the weights stay in memory, as the model runs on a CPU)\n"
    )


def test_a_model_in_that_state_is_left_alone(listening, capsys):
    listening(FakeSleepMode(NOTHING))
    assert main(["sleep"]) == main(["wake"]) == 0
    assert capsys.readouterr().out == "paged_llm is asleep already\npaged_llm is awake already\n"


def test_all_instances_of_a_model_sleep(listening, capsys):
    modes = [listening(FakeSleepMode(ON_CPU)) for _ in range(2)]
    assert main(["sleep"]) == 0
    assert [len(mode.asked) for mode in modes] == [1, 1]
    assert capsys.readouterr().out.count("is asleep") == 2


def test_errors_of_the_server_are_reported(listening, capsys):
    listening(FakeSleepMode(RequestError(ErrorCode.DEADLINE_EXCEEDED, "requests are still open after 5 s: 2")))
    assert main(["sleep"]) == main(["wake"]) == 1
    assert capsys.readouterr().err == "paged: DEADLINE_EXCEEDED: requests are still open after 5 s: 2\n" * 2


def test_without_a_server_the_model_is_named(capsys):
    assert main(["sleep", "--model", "other"]) == main(["wake", "--model", "other"]) == 2
    error = "no server of this user on this machine serves other; in a container, run the command there\n"
    assert capsys.readouterr().err == f"paged sleep: {error}paged wake: {error}"
