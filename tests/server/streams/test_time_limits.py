"""Time limits in every stage of a request. The engine is real; a gate holds its steps."""

import json
from itertools import islice
from threading import Event

import pytest

from paged_backend.engine.engine import Engine
from paged_backend.server.streams import responder
from paged_backend.server.streams.responder import Responder
from tests.support.callers import Caller
from tests.support.in_process import WAIT, running, tiny_assembly
from tests.support.pairwise import pairwise
from tests.support.service_calls import (
    HOUR,
    ask,
    finish,
)
from tests.support.waiting import until

BEAM_SEARCH = {"beam_width": 3, "logprobs": 1, "stop_token_ids": list(range(0, 250, 3)), "early_stopping": "never"}


class BeamSearchCaller(Caller):
    """A beam search."""

    def __init__(self, service, *, n, stream, **sampling):
        names = ("token_ids", "num_output_tokens", "logprobs", "cumulative_logprob", "finish_reason")
        super().__init__(
            text_input="abcd",
            stream=stream,
            sampling_parameters=json.dumps(BEAM_SEARCH | {"n": n} | sampling),
            exclude_input_in_output=True,
            **{f"return_{name}": True for name in names},
        )
        self.n = n
        service.submit(self)

    def result(self):
        texts, ids, logprobs = ([[] for _ in range(self.n)] for _ in range(3))
        for outputs in self.all():
            flat = iter(outputs["token_ids"])
            for index in range(self.n):
                texts[index].append(outputs["text_output"][index])
                ids[index] += islice(flat, outputs["num_output_tokens"][index])
                logprobs[index] += json.loads(outputs["logprobs"][index]) or []
        texts = [b"".join(parts) for parts in texts]
        return (texts, ids, logprobs, outputs["cumulative_logprob"]), outputs["finish_reason"]


@pytest.fixture
def scheduled():
    """Return a function that waits until the responder knows that a request runs: it asks the engine only then."""
    return lambda service: until(
        lambda: any(stream.scheduled_at for stream in list(service._responder.streams.values())), "the first step"
    )


@pytest.fixture
def expire_called(monkeypatch):
    """Return a function that waits until the engine is asked to end a beam search; the grace period is an hour."""
    asked, expire = Event(), Engine.expire
    monkeypatch.setattr(Engine, "expire", lambda self, key: (expire(self, key), asked.set()))
    monkeypatch.setattr(responder, "GRACE_SECONDS", HOUR)
    return lambda: asked.wait(WAIT) or pytest.fail("it was not asked")


def test_a_waiting_request_times_out(serve, gate, clock):
    service = serve(max_num_seqs=1)
    running = ask(service)
    gate.wait()
    waiting = ask(service, timeout_ms=HOUR)
    gate.step()
    clock.ahead += HOUR / 1e3
    assert finish(waiting) == ("timeout", 0)
    gate.open()
    assert finish(running) == ("length", 9)


def test_a_pause_during_a_check_does_not_postpone_the_next_one(serve, gate, clock, monkeypatch):
    service, paused, check = serve(), Event(), Responder._fail_stalled
    waiting = ask(service, timeout_ms=HOUR)
    gate.wait()

    def pause(self):
        if not paused.is_set():
            clock.ahead += HOUR / 1e3
            paused.set()
        check(self)

    monkeypatch.setattr(Responder, "_fail_stalled", pause)
    assert paused.wait(WAIT)
    assert waiting.answer()["finish_reason"] == [b"timeout"]
    gate.open()


def test_a_partly_prefilled_request_times_out(serve, gate, clock):
    service = serve(max_num_batched_tokens=8, max_num_seqs=8)
    reading = ask(service, "x" * 30, timeout_ms=HOUR)
    gate.wait()
    gate.step(2)
    clock.ahead += HOUR / 1e3
    assert finish(reading) == ("timeout", 0)
    gate.open()


@pytest.mark.parametrize("n", [1, 3])
def test_a_timeout_returns_the_tokens_generated_so_far(serve, gate, clock, n):
    service = serve()
    asked = ask(service, timeout_ms=HOUR, n=n)
    gate.wait()
    gate.step(4)
    clock.ahead += HOUR / 1e3
    answer = asked.answer()
    assert answer["finish_reason"] == [b"timeout"] * n
    assert answer["num_output_tokens"] in ([3] * n, [4] * n)  # it may end before the last step is read
    gate.open()


@pytest.mark.parametrize(("steps", "n", "stream"), pairwise([1, 2, 5], [1, 3], [False, True]))
def test_a_timed_out_beam_search_returns_its_best_beams(serve, gate, clock, scheduled, expire_called, steps, n, stream):
    """The result equals that of a search with as many tokens; some beams have ended by then."""
    service = serve(enable_prefix_caching=False)
    cut = BeamSearchCaller(service, n=n, stream=stream, max_tokens=40, timeout_ms=HOUR)
    gate.wait()
    gate.step(steps)
    scheduled(service)
    clock.ahead += HOUR / 1e3
    expire_called()
    gate.open()
    found, reasons = cut.result()
    assert reasons == [b"timeout"] * n
    expected, reasons = BeamSearchCaller(service, n=n, stream=stream, max_tokens=steps + 1).result()
    assert found == expected
    assert (n, steps) != (3, 5) or set(reasons) == {b"stop", b"length"}


def test_a_timed_out_beam_search_does_not_wait_for_a_stuck_engine(serve, gate, clock, scheduled, expire_called):
    """The responder ends it with the common prefix of its beams, which is empty here."""
    service = serve()
    cut = ask(service, timeout_ms=HOUR, beam_width=3, n=3)
    gate.wait()
    gate.step(2)
    scheduled(service)
    clock.ahead += HOUR / 1e3
    expire_called()
    assert cut.empty()
    clock.ahead += responder.GRACE_SECONDS
    assert cut.answer()["finish_reason"] == [b"timeout"] * 3
    gate.open()


def test_a_preempted_beam_search_times_out_with_its_best_beams(serve, gate, clock, scheduled, expire_called):
    service = serve(num_gpu_blocks_override=12, max_num_seqs=3)
    cut = ask(service, "a" * 8, timeout_ms=HOUR, beam_width=2, n=2, priority=1, max_tokens=20)
    gate.wait()
    gate.step(3)
    higher = ask(service, "b" * 40, max_tokens=4)
    gate.step()
    assert service._assembly.scheduler.stats.preemptions == 1
    scheduled(service)
    clock.ahead += HOUR / 1e3
    expire_called()
    gate.open()
    answer = cut.answer()
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ([b"timeout"] * 2, [4, 4])
    assert finish(higher) == ("length", 4)


def test_a_stopped_beam_search_returns_its_best_beams(serve, gate, scheduled, expire_called):
    service = serve()
    cut = ask(service, beam_width=2, n=2, max_tokens=20)
    gate.wait()
    gate.step(3)
    (stream,) = service._responder.streams.values()
    scheduled(service)
    stream.channel.stopped = True
    expire_called()
    gate.open()
    answer = cut.answer()
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ([b"cancelled"] * 2, [4, 4])


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_a_preempted_request_times_out(serve, gate, clock, swap_space):
    mode = "swap" if swap_space else "recompute"
    service = serve(num_gpu_blocks_override=8, swap_space=swap_space, preemption_mode=mode)
    lower = ask(service, "a" * 16, timeout_ms=HOUR, priority=1)
    gate.wait()
    gate.step(3)
    higher = ask(service, "b" * 20)
    gate.step()
    assert service._assembly.scheduler.stats.preemptions == 1
    clock.ahead += HOUR / 1e3
    assert finish(lower) == ("timeout", 4)
    gate.open()
    assert finish(higher) == ("length", 9)


@pytest.mark.parametrize(("timeout_us", "timeout_ms"), [(10**6 * 60, HOUR), (HOUR * 1000, 60_000), (0, 60_000)])
def test_the_shorter_time_limit_applies(serve, gate, clock, timeout_us, timeout_ms):
    service = serve()
    asked = ask(service, own={"timeout": timeout_us}, timeout_ms=timeout_ms)
    gate.wait()
    gate.step()
    clock.ahead += 59
    gate.step()
    assert asked.empty()
    clock.ahead += 1
    assert finish(asked)[0] == "timeout"
    gate.open()


@pytest.mark.parametrize("end", [Engine.abort, Engine.end_all])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_ends_before_it_reaches_the_engine_never_runs(tiny, monkeypatch, n, end):
    """A long prompt may be overdue once it is tokenized, before the engine gets the request."""
    with running(tiny_assembly(tiny[0])) as engine:
        announcement = engine.engine.announce(0)
        end(engine.engine, 0)
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "submit", engine.engine.deliver)
            gone = engine.submit([5, 6, 7], max_tokens=9, n=n)
        other = engine.submit([5, 6, 7], max_tokens=9)
        engine.wait(other)
        del announcement
        assert engine.outputs[gone].tokens == []
        assert engine.engine.waiting == 0
