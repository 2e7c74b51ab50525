"""Injected faults: each happens once, at its occurrence, and has its effect and no other; invalid ones are rejected."""

import json
import time

import pytest

from tests.support import faults
from tests.support.callers import Caller, serving
from tests.support.in_process import WAIT
from tests.support.recorded_graphs import CpuCapture
from tests.support.stress.server import Log

ASKED = {"text_input": "one two", "return_token_ids": True, "return_finish_reason": True,
         "sampling_parameters": '{"max_tokens": 6, "temperature": 0, "ignore_eos": true}'}  # fmt: skip


@pytest.fixture
def faulty(tiny):
    """A function that starts a service with faults and options."""

    def make(**asked):
        options = {name: asked.pop(name) for name in [*asked] if name not in faults.FAULTS}
        service_class = faults.faulty_service(faults.parse(json.dumps(asked)))
        return serving(tiny[0], service_class, **{"async_scheduling": False} | options)

    return make


def tokens(responses):
    return [token for response in responses for token in response["token_ids"]]


def test_leaked_block_stays_in_use(faulty):
    with faulty(leak_block=2) as calls:
        scheduler = calls.service._assembly.scheduler
        used = []
        for _ in range(3):
            calls.ask(**ASKED)
            used.append(scheduler.blocks.num_used)
    assert used == [0, 1, 1]


def test_wrong_token_reaches_the_client(tiny, faulty):
    with serving(tiny[0]) as calls:
        right = tokens([calls.ask(**ASKED)])
    with faulty(wrong_token=8) as calls:
        first, second = (tokens([calls.ask(**ASKED)]) for _ in range(2))
    assert first == right
    assert second == [*right[:1], right[1] ^ 1, *right[2:]]


def test_final_response_is_dropped_or_sent_twice(faulty):
    with faulty(double_final=2, drop_final=3) as calls:
        (expected,) = calls.call(**ASKED).all()
        assert calls.call(**ASKED).all() == [expected] * 2
        silent = calls.call(**ASKED)
        calls.ask(**ASKED)  # when it is answered, the earlier request has ended as well
        assert silent.empty()


def ends(caller):
    """Return all tokens of a request, and its error."""
    found, error, last = [], None, False
    while not last:
        outputs, error, last = caller.get(timeout=WAIT)
        found += outputs.get("token_ids", [])
    return found, error


PROMPTS = [chr(65 + index) * (3 + 4 * index) for index in range(8)]


def ask_all(calls):
    return [calls.call(**ASKED | {"text_input": prompt, "stream": True}) for prompt in PROMPTS]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan_row", "INTERNAL: the model's outputs for this request are not finite"),
        ("out_of_memory", "INTERNAL: the step failed: OutOfMemoryError: on purpose"),
    ],
)
def test_failed_step_ends_only_its_own_requests(tiny, faulty, fault, reason, overlap):
    with serving(tiny[0]) as calls:
        right = [ends(caller)[0] for caller in ask_all(calls)]
    with faulty(**{fault: 4}, async_scheduling=overlap) as calls:
        ended = [ends(caller) for caller in ask_all(calls)]
        failed = [error for _, error in ended if error]
        assert failed and all(reason in error for error in failed)
        assert len(failed) == 1 or fault != "nan_row"
        for (found, error), expected in zip(ended, right, strict=True):
            assert found == expected[: len(found)] if error else found == expected
        assert [ends(caller)[0] for caller in ask_all(calls)] == right  # and later requests are not affected
        scheduler = calls.service._assembly.scheduler
        scheduler.check()
        assert scheduler.blocks.num_used == 0
        assert calls.service.ready


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("operation", ["launch", "copy", "synchronize", "replay"])
def test_device_that_is_lost_ends_the_engine(faulty, monkeypatch, operation, overlap):
    """After such an error every operation of a GPU fails, unlike after a lack of memory."""
    if operation == "replay":
        CpuCapture(monkeypatch)
    two_samples = ASKED | {"sampling_parameters": '{"max_tokens": 6, "n": 2, "ignore_eos": true}'}  # copies a block
    with faulty(**{f"lost_at_{operation}": 2}, async_scheduling=overlap) as calls:
        callers = [calls.call(**two_samples | {"text_input": prompt}) for prompt in PROMPTS]
        found = [error for caller in callers if (error := ends(caller)[1])]
        died = "INTERNAL: the engine died: RunnerDied: the device has failed: AcceleratorError: CUDA error"
        assert any(died in error for error in found)
        assert all(died in error or "UNAVAILABLE: the engine has stopped" in error for error in found)
        assert not calls.service.ready
        assert "UNAVAILABLE: the engine has stopped" in calls.call(**ASKED).rejection()


def test_dead_engine_fails_all_requests_and_is_not_ready(faulty):
    with faulty(dead_engine=4) as calls:
        callers = ask_all(calls)
        errors = [ends(caller)[1] for caller in callers]
        found = [error for error in errors if error]
        died, late = "INTERNAL: the engine died: RunnerDied: on purpose", "UNAVAILABLE: the engine has stopped"
        assert any(died in error for error in found)
        assert all(died in error or late in error for error in found)
        assert not calls.service.ready
        assert "UNAVAILABLE: the engine has stopped" in calls.call(**ASKED).rejection()


def test_cache_of_a_dead_engine_is_not_written_to_disk(faulty, tmp_path):
    """The blocks may be corrupt."""
    with faulty(dead_engine=4, swap_space=0.01, disk_cache_dir=str(tmp_path / "kv")) as calls:
        for caller in ask_all(calls):
            ends(caller)
    assert not list((tmp_path / "kv").glob("*/*/*"))


def test_base_exception_in_the_loop_fails_all_requests(faulty, monkeypatch):
    class Panic(BaseException):
        """An exception as libraries written in Rust raise it."""

    def panic():
        raise Panic("index out of bounds")

    with faulty() as calls:
        monkeypatch.setattr(calls.service._assembly.scheduler, "schedule", panic)
        assert "INTERNAL: the engine died: Panic: index out of bounds" in calls.call(**ASKED).rejection()


def test_stalled_step_fails_open_requests(faulty):
    with faulty(stuck_step=4, stall_timeout=1, stop_timeout=1) as calls:
        callers = ask_all(calls)
        for caller in callers:
            _, error = ends(caller)
            assert "UNAVAILABLE: a step has taken" in error and "more than stall_timeout=1" in error
        assert not calls.service.ready


def test_stuck_step_delays_neither_requests_nor_shutdown(faulty):
    """Its requests end at their deadline with the tokens they have, and the engine is abandoned."""
    limits = {"request_timeout": 1, "stop_timeout": 1}
    with faulty(stuck_step=4, **limits) as calls:
        callers = ask_all(calls)
        for caller in callers:
            assert caller.all()[-1]["finish_reason"] == [b"timeout"]
        assert calls.service._engine.alive
    assert not calls.service._engine.alive


def test_wall_clock_jumps_are_harmless(faulty, monkeypatch):
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # restores it afterwards
    own, limits = time.time, {"request_timeout": 600, "session_ttl": 600.0}
    with faulty(wall_clock=2, **limits) as calls:
        ahead = []
        for _ in range(4):
            assert calls.ask(**ASKED)["finish_reason"] == [b"length"]
            ahead.append(round((time.time() - own()) / 3600))
    assert ahead == [0, 1, -1, 1]


def test_drop_is_logged_when_its_blocks_are_free(faulty, caplog):
    caplog.set_level("INFO", "paged_llm")
    with faulty(log_drops=1) as calls:
        gone = Caller(**ASKED | {"sampling_parameters": '{"max_tokens": 200, "ignore_eos": true}', "stream": True})
        gone.request_id = lambda: "gone"
        calls.service.submit(gone)
        gone.get(timeout=WAIT)  # the first token, so the engine has blocks to free
        gone.is_cancelled = lambda: True
        assert "CANCELLED" in ends(gone)[1]
        calls.ask(**ASKED)  # which is not logged
    (line,) = [one.getMessage() for one in caplog.records if "dropped" in one.getMessage()]
    log = Log()
    log(f"{line}\n")
    ((id, at),) = log.drops()
    assert id == "gone" and 0 <= time.monotonic() - at < WAIT
    assert log.drops() == []


def test_service_without_faults_is_not_wrapped(tiny):
    with serving(tiny[0]) as calls:
        assembly = calls.service._assembly
        for thing in (calls.service, assembly.scheduler, assembly.scheduler.blocks, assembly.runner):
            assert not [name for name in vars(thing) if hasattr(type(thing), name)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"drop": 1}', "drop: unknown fault; known are leak_block"),
        ('{"drop_final": 0}', "drop_final=0: must be a whole number of at least 1"),
        ('{"drop_final": true}', "drop_final=true: must be"),
    ],
)
def test_invalid_faults_are_rejected(text, reason):
    with pytest.raises(ValueError, match=reason):
        faults.parse(text)
