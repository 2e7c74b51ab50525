"""The runner of rank 0: what it sends to the other ranks, and what an error of any rank means."""

from types import SimpleNamespace

import pytest

from paged_backend.engine.model_memory import MemoryCommand
from paged_backend.engine.parallel_runner import ParallelMemory, ParallelRunner
from paged_backend.execution.runner import RunnerDied
from paged_backend.kv.ledger import Transfer, Transfers
from paged_backend.scheduling.plan import Plan

STATE = dict.fromkeys("kv host drafter copier gqa_group uniform".split())


class FakeWorkers:
    """Other ranks that only record what they are sent."""

    def __init__(self, reason=None):
        self.sent = []
        self.send = self.sent.append
        self.failure_reason = lambda: reason


def fail(*arguments):
    raise RuntimeError("device error")


def test_transfers_are_sent_without_contents_and_chunks():
    """A content is an object of rank 0's prefix cache."""
    moved, workers = [], FakeWorkers()
    runner = ParallelRunner(SimpleNamespace(**STATE, move=moved.append), workers)
    plan = Plan(("chunk",), Transfers((Transfer(1, 2, "entry", ((1, 2),)),), copies=(Transfer(3, 4),)))
    runner.move(plan)
    assert workers.sent == [Plan((), Transfers((Transfer(1, 2, None, ((1, 2),)),), copies=(Transfer(3, 4),)))]
    assert moved == [plan]


def test_plan_without_transfers_is_not_sent():
    moved, workers = [], FakeWorkers()
    ParallelRunner(SimpleNamespace(**STATE, move=moved.append), workers).move(Plan(("chunk",)))
    assert (workers.sent, len(moved)) == ([], 1)


def test_step_is_sent_before_rank_0_launches_it():
    workers = FakeWorkers()
    launch = lambda packed: SimpleNamespace(result=lambda: (packed, list(workers.sent)))  # noqa: E731
    step = ParallelRunner(SimpleNamespace(**STATE, launch=launch), workers).launch("packed")
    assert step.result() == ("packed", ["packed"])


@pytest.mark.parametrize(
    ("reason", "message"), [("rank 1 has ended", "rank 1 has ended"), (None, "RuntimeError: device error")]
)
def test_any_error_ends_the_runner(reason, message):
    """An error that is raised when the results are read does, too. If another rank has an error, that is the cause."""
    launch = lambda packed: SimpleNamespace(result=fail)  # noqa: E731
    runner = ParallelRunner(SimpleNamespace(**STATE, move=fail, launch=launch), FakeWorkers(reason))
    with pytest.raises(RunnerDied, match=message):
        runner.move(Plan(()))
    step = runner.launch("packed")
    with pytest.raises(RunnerDied, match=message):
        step.result()


def test_memory_of_all_ranks_is_released_and_restored():
    """The other ranks are told first, as they agree with rank 0 whether the memory suffices."""
    workers = FakeWorkers()
    of_rank_0 = SimpleNamespace(
        released="bytes", host_bytes=5, release=lambda: list(workers.sent), restore=lambda: list(workers.sent)
    )
    memory = ParallelMemory(of_rank_0, workers)
    assert (memory.released, memory.host_bytes) == ("bytes", 5)
    assert memory.release() == [MemoryCommand.RELEASE]
    assert memory.restore() == [MemoryCommand.RELEASE, MemoryCommand.RESTORE]
