"""Sleep mode of a running engine: what is kept, what is rejected, and the same tokens after waking."""

import threading
import time
from types import SimpleNamespace

import pytest

from paged_backend.api.errors import ModelAsleep, RequestError
from paged_backend.engine import model_memory
from paged_backend.engine.outputs import PoolMap
from paged_backend.engine.sleep_mode import ASLEEP, GOING_TO_SLEEP, NOTHING, SleepMode
from paged_backend.execution.runner import Runner
from paged_backend.kv.pages import FREE
from tests.support.in_process import WAIT, generate_with_transformers, running, tiny_assembly
from tests.support.service_calls import Gate
from tests.support.waiting import until

PROMPT = list(range(40, 89))
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def alone(tiny):
    return generate_with_transformers(tiny[1], PROMPT, MAX_TOKENS)


@pytest.fixture
def awake(tiny):
    """A running engine that is awake."""
    with running(tiny_assembly(tiny[0])) as engine:
        yield engine


def ask(engine, prompt=PROMPT, **options):
    """Return the tokens of a prompt, how many tokens of the prompt were cached, and how many of those on the host."""
    before = engine.history[-1].stats if engine.history else None
    (output,) = engine.wait(engine.submit(prompt, max_tokens=MAX_TOKENS, **options))
    counts = [(one.cached_tokens, one.host_tokens) if one else (0, 0) for one in (before, engine.history[-1].stats)]
    return output.tokens, *(after - earlier for earlier, after in zip(*counts, strict=True))


def cycle(engine):
    mode = engine.engine.sleep_mode
    assert mode.sleep(WAIT).changed
    assert mode.wake().changed


def sleeping(engine):
    """Return the metric in the statistics of the next step output."""
    return engine.step().stats.sleeping


@pytest.mark.usefixtures("async_scheduling")
def test_tokens_after_waking_equal_those_before(awake, alone):
    mode = awake.engine.sleep_mode
    assert ask(awake) == (alone, 0, 0)
    assert ask(awake) == (alone, 48, 0)
    began = time.monotonic()
    slept = mode.sleep(WAIT)
    assert slept.changed and 0 < slept.seconds <= time.monotonic() - began
    assert slept.memory.pool == awake.assembly.runner.kv.memory.nbytes
    assert (mode.problem, mode.sleep(WAIT)) == (ASLEEP, NOTHING)
    until(lambda: sleeping(awake))
    woken = mode.wake()
    assert (woken.changed, woken.memory) == (True, slept.memory)
    assert (mode.problem, mode.wake()) == (None, NOTHING)
    until(lambda: not sleeping(awake))
    assert ask(awake) == (alone, 0, 0), "the prefix cache was not emptied"
    assert ask(awake) == (alone, 48, 0)


def test_the_pool_map_of_a_sleeping_model_is_empty(awake):
    ask(awake)
    awake.engine.sleep_mode.sleep(WAIT)
    awake.engine.snapshot_pool()
    while not isinstance(output := awake.steps.get(timeout=WAIT), PoolMap):
        pass
    assert set(output.states) == {FREE}
    assert output.stats.sleeping
    assert (output.stats.blocks_used, output.stats.blocks_cached) == (0, 0)


def test_requests_that_reach_a_sleeping_engine_are_rejected(awake, alone):
    """A request may be admitted just before the model begins to go to sleep."""
    mode = awake.engine.sleep_mode
    mode.check()
    mode.sleep(WAIT)
    with pytest.raises(ModelAsleep, match="UNAVAILABLE: the model is asleep; wake it with `paged wake`"):
        mode.check()
    (output,) = awake.wait(awake.submit(PROMPT))
    assert str(output.error) == f"UNAVAILABLE: {ASLEEP}"
    assert awake.engine.waiting == 0
    mode.wake()
    mode.check()
    assert ask(awake)[0] == alone


def test_a_session_is_recomputed(tiny, alone):
    with running(tiny_assembly(tiny[0])) as engine:
        assert ask(engine, session="chat") == (alone, 0, 0)
        assert "chat" in engine.assembly.scheduler.pins
        cycle(engine)
        assert "chat" not in engine.assembly.scheduler.pins
        turn = [*PROMPT, *alone, 7, 8]
        expected = generate_with_transformers(tiny[1], turn, MAX_TOKENS)
        assert ask(engine, turn, session="chat") == (expected, 0, 0)
        assert "chat" in engine.assembly.scheduler.pins
        engine.engine.unpin("chat")


def test_blocks_of_the_host_pool_stay_cached(tiny, alone):
    """Other prompts have moved the blocks of the first one to the host."""
    with running(tiny_assembly(tiny[0], num_gpu_blocks_override=24, swap_space=0.01)) as engine:
        ask(engine)
        for start in (100, 150, 200):
            ask(engine, list(range(start, start + 70)))
        cycle(engine)
        tokens, cached, on_host = ask(engine)
        assert tokens == alone
        assert cached == on_host > 0


def test_blocks_are_written_to_disk_before_they_are_released(tiny, alone, tmp_path):
    options = {"swap_space": 0.01, "disk_cache_dir": str(tmp_path / "kv"), "disk_cache_gib": 0.01}
    with running(tiny_assembly(tiny[0], **options)) as engine:
        assert ask(engine)[0] == alone
        cycle(engine)
        assert len(list((tmp_path / "kv").glob("*/*/*.safetensors"))) == (len(PROMPT) + MAX_TOKENS - 1) // 4
        assert ask(engine) == (alone, 48, 48)
    with running(tiny_assembly(tiny[0], **options)) as engine:
        assert ask(engine) == (alone, 48, 48)


def test_samples_and_draft_tokens_after_waking(tiny, draft):
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    with running(tiny_assembly(tiny[0], speculative_model=str(draft), num_speculative_tokens=2)) as engine:
        expected = engine.generate([PROMPT, PROMPT[:9]], **sampling)
        cycle(engine)
        assert engine.generate([PROMPT, PROMPT[:9]], **sampling) == expected


@pytest.fixture
def held(tiny, monkeypatch):
    """(running engine, gate): every step waits for the gate."""
    assembly = tiny_assembly(tiny[0])
    gate = Gate(monkeypatch)
    with running(assembly) as engine:
        yield engine, gate
        gate.open()


def test_open_requests_end_first(held, alone):
    engine, gate = held
    mode, reports, slept = engine.engine.sleep_mode, [], []
    key = engine.submit(PROMPT, max_tokens=MAX_TOKENS)
    gate.wait()
    thread = threading.Thread(target=lambda: slept.append(mode.sleep(WAIT, reports.append)))
    thread.start()
    until(lambda: mode.problem == GOING_TO_SLEEP)
    gate.step()
    until(lambda: reports)
    with pytest.raises(RequestError, match="another `paged sleep` or `paged wake` is in progress"):
        mode.wake()
    gate.open()
    assert engine.wait(key)[0].tokens == alone
    thread.join(WAIT)
    assert set(reports) == {1}
    assert slept[0].changed and mode.problem == ASLEEP


def test_after_the_timeout_nothing_is_changed(held, alone):
    engine, gate = held
    mode = engine.engine.sleep_mode
    key = engine.submit(PROMPT, max_tokens=MAX_TOKENS)
    announcements = [engine.engine.announce(99)]
    gate.wait()
    announcements.append(engine.engine.announce(100))
    gate.open()
    engine.engine.abort(99)
    assert engine.wait(key)[0].tokens == alone
    until(lambda: engine.engine.num_open == 1, "the end of the aborted request")
    with pytest.raises(RequestError, match=r"DEADLINE_EXCEEDED: requests are still open after 0\.3 s: 1; nothing was"):
        mode.sleep(0.3)
    assert mode.problem is None
    engine.engine.abort(100)
    assert ask(engine) == (alone, 48, 0)


def test_a_command_that_ends_ends_the_wait(awake, alone):
    def gone(open_requests):
        raise BrokenPipeError("the command has ended")

    announcement = awake.engine.announce(99)
    with pytest.raises(BrokenPipeError):
        awake.engine.sleep_mode.sleep(WAIT, gone)
    awake.engine.abort(99)
    del announcement
    assert awake.engine.sleep_mode.problem is None
    assert ask(awake)[0] == alone


def test_a_model_that_does_not_fit_stays_asleep(awake, alone, monkeypatch):
    mode = awake.engine.sleep_mode
    mode.sleep(WAIT)
    with monkeypatch.context() as patch:
        patch.setattr(model_memory, "available_memory", lambda: 0)
        with pytest.raises(RequestError, match=r"UNAVAILABLE: the model needs .* GiB are missing"):
            mode.wake()
    assert mode.problem == ASLEEP
    assert mode.wake().changed
    assert ask(awake)[0] == alone


def test_an_engine_that_dies_answers(awake, monkeypatch):
    def fail(runner):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Runner, "release_graphs", fail)
    with pytest.raises(RequestError, match="UNAVAILABLE: the engine has stopped"):
        awake.engine.sleep_mode.sleep(WAIT)
    monkeypatch.undo()
    assert not awake.engine.alive


def test_a_stopped_engine_answers():
    with pytest.raises(RequestError, match="UNAVAILABLE: the engine has stopped"):
        SleepMode(SimpleNamespace(post=lambda *change, commit: None, sleep=None), lambda: False).sleep(WAIT)
