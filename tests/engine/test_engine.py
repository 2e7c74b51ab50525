"""The engine: what its callers see of its thread."""

from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.api.request import Adapter, GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine.engine import Engine
from paged_backend.engine.outputs import EngineDied, PoolMap
from paged_backend.kv.blocks import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from tests.support.in_process import WAIT, tiny_assembly
from tests.support.waiting import until


class Added(Scheduler):
    """Records the requests that reach it, and loses them."""

    def __init__(self):
        super().__init__(BlockManager(8, BlockLayout(4)), max_num_seqs=2, max_num_batched_tokens=16)
        self.added = SimpleQueue()

    def add(self, request):
        self.added.put(request)


@pytest.fixture
def started():
    """Return a function that starts an engine without a model: (engine, its scheduler, its outputs)."""
    engines = []

    def start(**parts):
        scheduler, outputs = Added(), SimpleQueue()
        engines.append(Engine(scheduler, SimpleNamespace(), outputs.put, **parts))
        engines[-1].start()
        return engines[-1], scheduler, outputs

    yield start
    for engine in engines:
        engine.stop()


def request(key=1, **sampling):
    return GenerateRequest(key, (1, 2), SamplingParams(**sampling), 0, frozenset())


def adapters(get):
    """Return a registry that loads adapters on the calling thread."""
    return SimpleNamespace(run=lambda load, *arguments: load(*arguments), get=get, close=lambda seconds: None)


def test_engine_emits_one_pool_map_for_concurrent_callers(tiny):
    assembly, steps = tiny_assembly(tiny[0]), SimpleQueue()
    engine = assembly.engine(steps.put)
    for _ in range(5):
        engine.snapshot_pool()
    engine.start()
    assert isinstance(steps.get(timeout=WAIT), PoolMap)
    engine.stop()
    assert steps.empty()


def test_request_that_is_ended_no_longer_counts_as_waiting(tiny):
    """The number of waiting requests falls before the engine's thread has seen the end."""
    engine = tiny_assembly(tiny[0]).engine(lambda output: None)
    announcements = [engine.announce(key) for key in range(4)]
    assert engine.waiting == len(announcements) == 4
    engine.abort(0)
    engine.end_all(1)
    engine.reject(2, RequestError(ErrorCode.INTERNAL, "no grammar"))
    assert engine.waiting == 1


def test_error_of_another_thread_ends_the_engine(tiny):
    steps = SimpleQueue()
    engine = tiny_assembly(tiny[0]).engine(steps.put)
    engine.start()
    assert engine.alive
    engine.fail("a rank has ended")
    assert not engine.alive
    died = steps.get(timeout=WAIT)
    assert isinstance(died, EngineDied)
    assert "a rank has ended" in died.reason
    engine.stop()


def test_announced_request_counts_as_waiting_until_it_is_rejected(started):
    engine, _, outputs = started()
    announcement = engine.announce(1)
    engine.emit_stats()
    assert outputs.get(timeout=WAIT).stats.waiting == 1 and engine.is_pending(1)
    error = RequestError(ErrorCode.INVALID_ARGUMENT, "no")
    engine.reject(1, error)
    engine.reject(1, error)
    del announcement
    output = outputs.get(timeout=WAIT)
    assert [(delta.key, delta.error) for delta in output.deltas] == [(1, error)]
    assert (output.stats.waiting, engine.num_open) == (0, 0)
    engine.emit_stats()
    assert outputs.get(timeout=WAIT).deltas == ()


@pytest.mark.parametrize("end", [lambda engine: engine.abort(1), lambda engine: engine.end(1, 0),
                                 lambda engine: engine.end_all(1)], ids=["abort", "end", "end_all"])  # fmt: skip
def test_request_that_is_ended_before_it_is_delivered_does_not_run(started, end):
    engine, scheduler, _ = started()
    announcement = engine.announce(1)
    end(engine)
    until(lambda: not engine.num_open, "the end of the request")
    engine.deliver(replace(request(1), announcement=announcement))
    engine.submit(request(2))
    assert scheduler.added.get(timeout=WAIT).key == 2


def test_withdrawn_request_is_left_to_others(started):
    engine, _, _ = started()
    announcement = engine.announce(1)
    assert engine.withdraw(1) and not engine.withdraw(1)
    del announcement
    assert (engine.waiting, engine.num_open) == (0, 0)


def test_announced_request_that_nobody_delivers_fails(started):
    """The thread that prepared it has raised an unexpected error."""
    engine, _, outputs = started()
    announcement = engine.announce(1)
    assert engine.is_pending(1)
    del announcement
    output = outputs.get(timeout=WAIT)
    assert [delta.key for delta in output.deltas] == [1]
    assert "INTERNAL: the engine has lost the request" in str(output.deltas[0].error)
    assert not engine.num_open


def test_request_is_added_with_its_adapter(started):
    adapter = Adapter("a", b"a", 1, {})
    engine, scheduler, _ = started(adapters=adapters({"a": adapter}.get))
    engine.submit(request(lora_name="a"))
    assert scheduler.added.get(timeout=WAIT).adapter is adapter


@pytest.mark.parametrize(
    ("raised", "code", "reason"),
    [
        (RequestError(ErrorCode.INVALID_ARGUMENT, "no such adapter"), ErrorCode.INVALID_ARGUMENT, "no such adapter"),
        (OSError("disk"), ErrorCode.INTERNAL, "its adapter could not be loaded: OSError: disk"),
    ],
)
def test_adapter_that_cannot_be_loaded_rejects_the_request(started, raised, code, reason):
    def get(name):
        raise raised

    engine, _, outputs = started(adapters=adapters(get))
    engine.submit(request(lora_name="a"))
    while not (deltas := outputs.get(timeout=WAIT).deltas):
        pass
    assert deltas[0].error.code is code and reason in str(deltas[0].error)


def test_request_that_the_scheduler_has_lost_fails(started):
    engine, _, outputs = started()
    engine.submit(request())
    while not (deltas := outputs.get(timeout=WAIT).deltas):
        pass
    assert "the engine has lost the request" in str(deltas[0].error)
    assert not engine.num_open
