"""Time limits in every stage, full queues, tenant limits, stop_request, and the health of a service.

The engine is real; a gate holds its steps, and tests advance the responder's clock.
"""

import json
import time
from contextlib import ExitStack, contextmanager
from itertools import islice
from queue import SimpleQueue
from threading import Event, Semaphore

import pytest

from paged_backend.engine import step_loop
from paged_backend.engine.engine import Engine
from paged_backend.execution.runner import Runner
from paged_backend.server import cancellation, engine_monitor, responder
from paged_backend.server.stream import Stream
from paged_backend.server.wire.parameters import SEQUENCE_END, SEQUENCE_START
from tests.support.callers import Caller, serving
from tests.support.in_process import WAIT, running, tiny_assembly
from tests.support.waiting import until

FOREVER = 10**6


class Gate:
    """Holds every step before it is launched."""

    def __init__(self, monkeypatch):
        self._permits, self._held, launch = Semaphore(0), SimpleQueue(), Runner.launch

        def held(runner, packed):
            self._held.put(None)
            self._permits.acquire()
            return launch(runner, packed)

        monkeypatch.setattr(Runner, "launch", held)

    def wait(self):
        """Wait until a step is held."""
        self._held.get(timeout=WAIT)

    def step(self, count=1):
        """Release this many steps, and wait until the next one is held."""
        for _ in range(count):
            self.release()
            self.wait()

    def release(self):
        self._permits.release()

    def open(self):
        self._permits.release(FOREVER)


class SingleCaller(Caller):
    """A non-streaming request. own: fields of the Triton request besides its tensors."""

    def __init__(self, service, own=None, **inputs):
        super().__init__(**inputs)
        for name, value in (own or {}).items():
            setattr(self, name, lambda value=value: value)
        service.submit(self)

    def answer(self):
        """Return the outputs, or the error."""
        outputs, error, last = self.get(timeout=WAIT)
        assert last
        assert self.empty()
        return error or outputs


RETURNED = {"return_finish_reason": True, "return_num_output_tokens": True}


def ask(service, text="abcd", own=None, **sampling):
    sampling = {"max_tokens": 9, "temperature": 0, "ignore_eos": True} | sampling
    return SingleCaller(service, own, text_input=text, sampling_parameters=json.dumps(sampling), **RETURNED)


def finish(asked):
    answer = asked.answer()
    return answer["finish_reason"][0].decode(), answer["num_output_tokens"][0]


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.fixture
def serve(tiny, monkeypatch):
    """Return a function that creates a service; at the end, check that no service leaked anything."""
    with ExitStack() as stack:
        made = []

        def make(**options):
            with monkeypatch.context() as patch:
                patch.setattr(Runner, "launch", UNHELD)  # do not hold steps while the model loads
                made.append(stack.enter_context(serving(tiny[0], **options)).service)
            return made[-1]

        yield make
    for service in made:
        scheduler = service._assembly.scheduler
        scheduler.check()
        assert not scheduler.has_work
        assert scheduler.blocks.num_used == 0
        assert service._engine.waiting == 0


UNHELD = Runner.launch


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(responder, "time", made)
    return made


HOUR = 3_600_000  # milliseconds


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
    assert answer["num_output_tokens"] == [4] * n
    gate.open()


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
def expire_called(monkeypatch):
    """Return a function that waits until the engine is asked to end a beam search; the grace period is an hour."""
    asked, expire = Event(), Engine.expire
    monkeypatch.setattr(Engine, "expire", lambda self, key: (expire(self, key), asked.set()))
    monkeypatch.setattr(cancellation, "GRACE_SECONDS", HOUR)
    return lambda: asked.wait(WAIT) or pytest.fail("it was not asked")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_timed_out_beam_search_returns_its_best_beams(serve, gate, clock, expire_called, steps, n, stream):
    """The result equals that of a search with as many tokens; some beams have ended by then."""
    service = serve(enable_prefix_caching=False)
    cut = BeamSearchCaller(service, n=n, stream=stream, max_tokens=40, timeout_ms=HOUR)
    gate.wait()
    gate.step(steps)
    clock.ahead += HOUR / 1e3
    expire_called()
    gate.open()
    found, reasons = cut.result()
    assert reasons == [b"timeout"] * n
    expected, reasons = BeamSearchCaller(service, n=n, stream=stream, max_tokens=steps + 1).result()
    assert found == expected
    assert (n, steps) != (3, 5) or set(reasons) == {b"stop", b"length"}


def test_a_timed_out_beam_search_does_not_wait_for_a_stuck_engine(serve, gate, clock, expire_called):
    """The responder ends it with the common prefix of its beams, which is empty here."""
    service = serve()
    cut = ask(service, timeout_ms=HOUR, beam_width=3, n=3)
    gate.wait()
    gate.step(2)
    clock.ahead += HOUR / 1e3
    expire_called()
    assert cut.empty()
    clock.ahead += cancellation.GRACE_SECONDS
    assert cut.answer()["finish_reason"] == [b"timeout"] * 3
    gate.open()


def test_a_preempted_beam_search_times_out_with_its_best_beams(serve, gate, clock, expire_called):
    service = serve(num_gpu_blocks_override=12, max_num_seqs=3)
    cut = ask(service, "a" * 8, timeout_ms=HOUR, beam_width=2, n=2, priority=1, max_tokens=20)
    gate.wait()
    gate.step(3)
    higher = ask(service, "b" * 40, max_tokens=4)
    gate.step()
    assert service._assembly.scheduler.stats.preemptions == 1
    clock.ahead += HOUR / 1e3
    expire_called()
    gate.open()
    answer = cut.answer()
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ([b"timeout"] * 2, [4, 4])
    assert finish(higher) == ("length", 4)


def test_a_stopped_beam_search_returns_its_best_beams(serve, gate, expire_called):
    service = serve()
    cut = ask(service, beam_width=2, n=2, max_tokens=20)
    gate.wait()
    gate.step(3)
    (stream,) = service._responder.streams.by_key.values()
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
        engine.engine.announce(0)
        end(engine.engine, 0)
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "submit", engine.engine.deliver)
            gone = engine.submit([5, 6, 7], max_tokens=9, n=n)
        other = engine.submit([5, 6, 7], max_tokens=9)
        engine.wait(other)
        assert engine.outputs[gone].tokens == []
        assert engine.engine.waiting == 0


def outcomes(monkeypatch):
    found = []
    monkeypatch.setattr("paged_backend.server.metrics.Metrics.ended", lambda self, reason: found.append(reason))
    return found


def test_an_internal_error_while_reading_fails_only_that_request(serve, monkeypatch):
    """Triton's `execute` submits one request after the other, so `submit` must never raise."""
    ended, service = outcomes(monkeypatch), serve()
    before, broken, after = (Caller(text_input="abcd", sampling_parameters='{"max_tokens": 2}') for _ in range(3))
    broken.inputs = lambda: 1 / 0
    for caller in (before, broken, after):
        service.submit(caller)
    assert broken.rejection() == "Error generating stream: INTERNAL: ZeroDivisionError: division by zero"
    assert broken.empty()
    assert before.all() and after.all()
    assert sorted(ended)[0] == "error" and len(ended) == 3


def test_a_service_with_a_stopped_responder_is_not_ready_and_rejects(serve):
    service = serve()
    assert service.ready
    service._responder.stop()
    assert not service.ready
    assert "UNAVAILABLE: the engine has stopped" in ask(service).answer()


def test_a_full_queue_rejects_requests_until_a_place_is_free(serve, gate, clock, monkeypatch):
    ended = outcomes(monkeypatch)
    service = serve(max_num_seqs=1, max_queue_size=2)
    running = ask(service)
    gate.wait()
    waiting = [ask(service), ask(service, timeout_ms=HOUR)]
    rejected = ask(service).answer()
    assert rejected == (
        "Error generating stream: UNAVAILABLE: 2 requests wait, which is max_queue_size; send it again later"
    )
    clock.ahead += HOUR / 1e3
    assert finish(waiting[1]) == ("timeout", 0)
    later = ask(service)  # during the same step
    assert "2 requests wait" in ask(service).answer()
    gate.open()
    assert [finish(one) for one in (running, waiting[0], later)] == [("length", 9)] * 3
    assert sorted(ended) == ["length"] * 3 + ["queue_full"] * 2 + ["timeout"]


def test_the_open_request_limit_applies_per_tenant(serve, gate, monkeypatch):
    """Running and waiting requests count, however they end. Requests without a salt belong to one tenant."""
    ended = outcomes(monkeypatch)
    service = serve(max_num_seqs=1, max_tenant_requests=2)
    running = ask(service, cache_salt="one", own={"request_id": "x"})
    gate.wait()
    waiting = ask(service, cache_salt="one")
    assert ask(service, cache_salt="one").answer() == (
        "Error generating stream: UNAVAILABLE: 2 requests of this cache_salt are open, which is max_tenant_requests;"
        " send it again when one has ended"
    )
    others = [ask(service, **salt) for salt in ({"cache_salt": "two"}, {}, {})]
    assert "max_tenant_requests" in ask(service).answer()
    bad = ask(service, cache_salt="two", max_tokens=10**6).answer()
    assert "INVALID_ARGUMENT: max_tokens" in bad
    assert stop(service, "x").answer() == {"num_stopped": [1]}
    assert "CANCELLED" in running.answer()
    others += [ask(service, cache_salt="one"), ask(service, cache_salt="two")]
    gate.open()
    assert [finish(one)[0] for one in (waiting, *others)] == ["length"] * 6
    assert len(service._tenants) == 0
    assert sorted(ended) == ["cancelled"] + ["length"] * 6 + ["refused"] + ["tenant_full"] * 2


@pytest.mark.parametrize(("fair_tenants", "before"), [(True, 1), (False, 10)])
def test_fair_scheduling_admits_a_tenant_past_another_tenants_queue(serve, gate, fair_tenants, before):
    service = serve(max_num_seqs=1, fair_tenants=fair_tenants)
    running = ask(service, cache_salt="many", max_tokens=2)
    gate.wait()
    waiting = [ask(service, cache_salt="many", max_tokens=1) for _ in range(9)]
    one = ask(service, cache_salt="one", max_tokens=1)
    assert (
        "max_tokens" in ask(service, max_tokens=10**6).answer()
    )  # answered once the earlier requests have reached the engine
    gate.step(1 + before)
    gate.release()
    assert finish(running) == ("length", 2)
    assert [finish(ended) for ended in (*waiting[: before - 1], one)] == [("length", 1)] * before
    assert all(other.empty() for other in waiting)
    gate.open()
    assert [finish(other) for other in waiting[before - 1 :]] == [("length", 1)] * (10 - before)


def test_a_preempted_request_does_not_count_against_the_queue_limit(serve, gate):
    service = serve(num_gpu_blocks_override=8, max_queue_size=1)
    lower = ask(service, "a" * 16, priority=1)
    gate.wait()
    gate.step(3)
    higher = ask(service, "b" * 20)
    gate.step()
    third = ask(service)
    assert "1 requests wait" in ask(service).answer()
    gate.open()
    assert [finish(one)[0] for one in (lower, higher, third)] == ["length"] * 3


def test_the_queue_limit_holds_and_no_request_is_lost_while_steps_run(serve, monkeypatch):
    """The engine admits requests while others arrive."""
    service, most = serve(max_queue_size=3, max_num_seqs=2), []
    admit = service._assembly.scheduler.add
    monkeypatch.setattr(
        service._assembly.scheduler,
        "add",
        lambda request: (admit(request), most.append(service._assembly.scheduler.stats.waiting)),
    )
    answers = [one.answer() for one in [ask(service, max_tokens=1) for _ in range(300)]]
    taken = [one for one in answers if isinstance(one, dict)]
    assert len(most) == len(taken) >= 3
    assert max(most) <= 3
    assert all("max_queue_size" in one for one in answers if isinstance(one, str))


def test_a_session_can_be_ended_while_the_queue_is_full(serve, gate):
    service = serve(max_num_seqs=1, max_queue_size=1)
    first = ask(service, own={"correlation_id": 7, "flags": SEQUENCE_START})
    gate.wait()
    gate.step(8)
    gate.release()
    assert finish(first) == ("length", 9)
    running = ask(service)
    gate.wait()
    waiting = ask(service)
    assert "max_queue_size" in ask(service, own={"correlation_id": 7}).answer()
    assert finish(ask(service, "", own={"correlation_id": 7, "flags": SEQUENCE_END})) == ("stop", 0)
    gate.open()
    assert [finish(one)[0] for one in (running, waiting)] == ["length"] * 2


def test_stop_request_ends_a_request_by_id(serve, gate):
    """All requests with that id end, running or waiting, and no others."""
    service = serve(max_num_seqs=1)
    running, waiting, other = (ask(service, own={"request_id": name}) for name in ("one", "one", "other"))
    gate.wait()
    gate.step(2)

    assert stop(service, "one").answer() == {"num_stopped": [2]}
    for one in (running, waiting):
        assert one.answer() == "CANCELLED: the request was ended by a stop_request"
    assert stop(service, "one").answer() == stop(service, "unknown").answer() == {"num_stopped": [0]}
    gate.open()
    assert finish(other) == ("length", 9)
    assert stop(service, "other").answer() == {"num_stopped": [0]}


def stop(service, name, **beside):
    return SingleCaller(service, {"request_id": name}, stop_request=True, **beside)


def test_stop_request_needs_an_id_and_no_other_inputs(serve):
    service = serve()
    assert "INVALID_ARGUMENT: stop_request: has no request id" in stop(service, "").answer()
    assert "text_input: has no effect with stop_request" in stop(service, "one", text_input="x").answer()


def test_a_waiting_stream_gets_an_empty_first_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    caller = Caller(text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 2}', **RETURNED)
    service.submit(caller)
    gate.wait()
    assert caller.empty()
    clock.ahead += 6
    outputs, error, last = caller.get(timeout=WAIT)
    assert (outputs["text_output"], outputs["num_output_tokens"], error, last) == ([b""], [0], None, False)
    gate.open()
    rest = caller.all()
    assert sum(part["num_output_tokens"][0] for part in rest) == 2


def test_a_stream_with_an_early_token_gets_no_empty_response(serve, gate, clock):
    service = serve(first_response_ms=5000)
    gate.open()
    caller = Caller(text_input="abcd", stream=True, sampling_parameters='{"max_tokens": 2}', **RETURNED)
    service.submit(caller)
    assert all(part["num_output_tokens"][0] for part in caller.all())


def test_a_request_that_the_engine_no_longer_tracks_fails(serve, gate, clock, monkeypatch):
    """Simulates a bug by removing the request from the scheduler."""
    service = serve()
    scheduler = service._assembly.scheduler
    lost, kept = ask(service), ask(service, "efgh")
    gate.wait()
    scheduler.abort(0)
    clock.ahead += engine_monitor.AUDIT_SECONDS + 1
    gate.open()
    assert "INTERNAL: the engine has lost the request" in lost.answer()
    assert finish(kept) == ("length", 9)


@pytest.mark.parametrize("streams", [True, False])
def test_a_response_larger_than_max_response_mib_fails(serve, gate, streams, monkeypatch):
    """Triton buffers what a client does not read. 1,680 tokens with 20 logprobs each are 2 MB."""
    ended = outcomes(monkeypatch)
    service = serve(max_response_mib=1, num_gpu_blocks_override=512)
    gate.open()
    big = {"max_tokens": 240, "logprobs": 20, "n": 7, "temperature": 1, "ignore_eos": True}
    inputs = {"text_input": "abcd", "stream": streams, "return_logprobs": True, **RETURNED}
    caller = Caller(**inputs, sampling_parameters=json.dumps(big))
    service.submit(caller)
    error = None
    while error is None:
        _, error, last = caller.get(timeout=WAIT)
    assert last
    assert "UNAVAILABLE: its answer is larger than max_response_mib=1" in error
    assert finish(ask(service)) == ("length", 9)
    assert ended == ["refused", "length"]


def test_a_request_rejected_by_the_engine_is_not_logged_as_an_internal_error(serve, gate, monkeypatch):
    """An example is an invalid grammar. The outcome `error` is for internal errors."""
    ended = outcomes(monkeypatch)
    service = serve()
    gate.open()
    bad = Caller(text_input="abcd", sampling_parameters='{"regex": "("}')
    service.submit(bad)
    assert "INVALID_ARGUMENT: regex" in bad.rejection()
    monkeypatch.setattr(Stream, "take", lambda self, delta, when: 1 / 0)
    assert "INTERNAL: ZeroDivisionError" in ask(service).answer()
    assert ended == ["refused", "error"]


@contextmanager
def two_seconds_later(monkeypatch):
    """Stop the clock two seconds from now."""
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(step_loop.time, "monotonic", lambda: now + 2)
        yield


def test_a_stalled_step_makes_the_service_not_ready(serve, gate, monkeypatch):
    service = serve(stall_timeout=1)
    assert service.ready
    stuck = ask(service)
    gate.wait()
    with two_seconds_later(monkeypatch):
        assert not service.ready
        result = "UNAVAILABLE: a step has taken 2 s, more than stall_timeout=1"
        assert result in ask(service).answer()
        assert result in stuck.answer()
    assert service.ready
    gate.open()
    assert finish(ask(service)) == ("length", 9)


def test_a_blocked_response_makes_the_service_not_ready(serve, gate, monkeypatch):
    service = serve(stall_timeout=1)
    gate.open()
    may_send, stuck = Event(), Caller(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    sending, send = Event(), stuck.send

    def wait(response, flags):
        sending.set()
        assert may_send.wait(WAIT)
        send(response, flags)

    stuck.send = wait
    service.submit(stuck)
    assert sending.wait(WAIT)
    until(lambda: not service._engine.busy_seconds)
    with two_seconds_later(monkeypatch):
        assert not service.ready
        reason = "sending responses has taken 2 s, more than stall_timeout=1"
        assert reason in ask(service).answer()
    may_send.set()
    stuck.all()
    assert service.ready


@pytest.mark.parametrize("sampling", [{}, {"regex": "a+", "ignore_eos": False}], ids=str)
def test_a_request_that_cannot_be_queued_fails_and_leaks_nothing(serve, gate, monkeypatch, sampling):
    service = serve(max_tenant_requests=1)
    gate.open()
    with monkeypatch.context() as patch:
        patch.setattr(service._grammars if sampling else service._engine, "compile" if sampling else "deliver", broken)
        assert "INTERNAL: RuntimeError: broken" in ask(service, **sampling).answer()
    assert finish(ask(service)) == ("length", 9)


def broken(*args, **kwargs):
    raise RuntimeError("broken")


def test_an_unexpected_responder_error_fails_no_stream(serve, gate, monkeypatch):
    service = serve()
    gate.open()
    fails = iter([True])

    def show(self, stats):
        if next(fails, False):
            raise RuntimeError("metrics are gone")

    monkeypatch.setattr("paged_backend.server.metrics.Metrics.show", show)
    assert finish(ask(service)) == ("length", 9)
    assert finish(ask(service)) == ("length", 9)
    assert service.ready


def test_polling_takes_at_most_its_share_of_the_thread(tiny, monkeypatch):
    """The first map is sent while the request runs; the second has to wait until it has ended."""
    monkeypatch.setattr(step_loop, "MAP_SHARE", 1e-9)
    with serving(tiny[0]) as calls:
        sampling = json.dumps({"max_tokens": 60, "ignore_eos": True})
        answer = calls.call(text_input="abc", stream=True, sampling_parameters=sampling)
        answer.get(timeout=WAIT)
        running = [json.loads(calls.ask(pool_map=True)["pool_map"][0])["running"] for _ in range(2)]
        assert running == [1, 0]
