"""The engine: what its callers see of its thread."""

from queue import SimpleQueue

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.engine.outputs import EngineDied, PoolMap
from tests.support.in_process import WAIT, tiny_assembly


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
    for key in range(4):
        engine.announce(key)
    assert engine.waiting == 4
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
