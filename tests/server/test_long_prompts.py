"""Long prompts, which are encoded in the background; and tokenizer failures in a service."""

import gc
import json
import threading
import time
import weakref
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from tokenizers import decoders

from paged_backend.api.errors import ErrorCode, RequestError
from paged_backend.server import admission
from paged_backend.server.prompts import encoder
from paged_backend.server.prompts.encoder import EncodedPrompt
from paged_backend.server.prompts.encoder_process import PromptProcess
from paged_backend.server.streams import responder
from paged_backend.server.wire import call as wire_call
from paged_backend.text import tokenizing
from tests.support.callers import Caller, serving
from tests.support.in_process import WAIT, byte_tokenizer
from tests.support.service_calls import outcomes
from tests.support.tokenizers import SlowTokenizer
from tests.support.waiting import until

LONG = "a" * 300


@pytest.mark.parametrize(
    ("inputs", "sampling"),
    [
        ({"text_input": "aa"}, {}),
        ({"text_input": "aa"}, {"stop": ["cc"]}),
        ({"text_input": "aa"}, {"stop": ["cc"], "beam_width": 2}),  # the engine's thread decodes too
        ({"input_ids": byte_tokenizer().encode("ab")}, {"echo": True}),
    ],
)
def test_a_decode_panic_fails_only_its_request(tiny, inputs, sampling):
    (panics,) = byte_tokenizer().encode("b")
    with serving(tiny[0]) as server:
        server.service._assembly.loaded.tokenizer.backend_tokenizer.decoder = decoders.Strip("b", 0, 2)
        asked = {"max_tokens": 3, "logit_bias": {panics: 100}} | sampling
        caller = server.call(**inputs, sampling_parameters=json.dumps(asked))
        assert "INTERNAL: DecodeError: PanicException: index out of bounds" in caller.rejection()
        assert server.service.ready
        assert server.ask(text_input="aa", sampling_parameters='{"max_tokens": 3}')


@pytest.fixture
def slow():
    made = SlowTokenizer(LONG)
    yield made
    made.go_on.set()


@pytest.fixture
def serve(tiny, slow, monkeypatch):
    """A service with a slow tokenizer for long prompts, and the outcomes that it counts."""
    monkeypatch.setattr(admission, "SHORT_CHARS", 200)
    monkeypatch.setattr(admission, "LONG_CHARS", 200)
    encode = lambda self, prompt: EncodedPrompt(slow.encode(prompt.call.prompt, False))  # noqa: E731
    monkeypatch.setattr(PromptProcess, "encode", encode)
    monkeypatch.setattr(PromptProcess, "start", lambda self: None)
    ended = outcomes(monkeypatch)
    with serving(tiny[0], max_queue_size=2) as server:
        server.outcomes = ended
        yield server
        slow.go_on.set()


def request_of(text, **own):
    caller = Caller(text_input=text, sampling_parameters='{"max_tokens": 1}')
    for name, value in own.items():
        setattr(caller, name, lambda value=value: value)
    return caller


def test_other_requests_are_served_while_a_long_prompt_is_tokenized(serve, slow):
    long = request_of(LONG)
    serve.service.submit(long)
    slow.began.get(timeout=WAIT)
    for _ in range(3):
        assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 2}')
    assert long.empty()
    slow.go_on.set()
    assert long.all()


def test_text_of_a_rejected_prompt_is_freed(serve, monkeypatch):
    """At once, not when Python looks for cycles: texts of megabytes would fill memory until then."""
    seen = []

    def encode(self, prompt):
        seen.append(weakref.ref(prompt))
        raise RequestError(ErrorCode.INVALID_ARGUMENT, "wrong")

    monkeypatch.setattr(PromptProcess, "encode", encode)
    gc.disable()
    try:
        assert "wrong" in serve.call(text_input=LONG, sampling_parameters='{"max_tokens": 1}').rejection()
        until(lambda: seen[0]() is None, "the end of the request")
    finally:
        gc.enable()


def test_long_prompts_count_as_waiting(serve, slow):
    waiting = [request_of(LONG), request_of(LONG)]
    for one in waiting:
        serve.service.submit(one)
    slow.began.get(timeout=WAIT)
    assert "2 requests wait (max_queue_size)" in serve.call(text_input="abcd").rejection()
    slow.go_on.set()
    for one in waiting:
        assert one.all()
    assert serve.ask(text_input="abcd")


def test_long_prompts_count_for_their_tenant(serve, slow, monkeypatch):
    """They count before they are tokenized, and do not delay other tenants."""
    monkeypatch.setattr(serve.service._admission, "_max_tenant_requests", 1)
    first = request_of(LONG)
    serve.service.submit(first)
    slow.began.get(timeout=WAIT)
    assert "1 requests of this cache_salt are open" in serve.call(text_input=LONG).rejection()
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1, "cache_salt": "other"}')
    slow.go_on.set()
    assert first.all()
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')


def test_a_blocked_rejection_does_not_delay_other_requests(serve):
    wrong, waited = Caller(text_input="abcd", sampling_parameters="[]"), []
    begun, answered = threading.Event(), threading.Event()
    wrong.send = lambda response, flags: (begun.set(), waited.append(answered.wait(WAIT)))
    refusing = threading.Thread(target=serve.service.submit, args=[wrong])
    refusing.start()
    assert begun.wait(WAIT)
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    answered.set()
    refusing.join(WAIT)
    assert waited == [True]


class Blocked:
    """A function that waits for `go_on` when `applies` is true of its arguments."""

    def __init__(self, function, applies):
        self._function, self._applies = function, applies
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments, **options):
        if self._applies(*arguments):
            self.begun.set()
            assert self.go_on.wait(WAIT)
        return self._function(*arguments, **options)


def begin(service, caller, blocked):
    """Submit a request on a thread of its own, and return once it waits."""
    thread = threading.Thread(target=service.submit, args=[caller], daemon=True)
    thread.start()
    assert blocked.begun.wait(WAIT)
    return thread


@pytest.mark.parametrize(
    ("where", "name", "inputs"),
    [
        (tokenizing.PromptTokenizer, "encode", {"text_input": "slow"}),
        (wire_call, "parse_json", {"text_input": "a", "sampling_parameters": '{"seed": 777}'}),
        (encoder, "render", {"messages": '[{"role": "user", "content": "slow"}]'}),
    ],
)
def test_a_request_that_is_slow_to_admit_delays_no_other(serve, monkeypatch, where, name, inputs):
    serve.service._assembly.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
    blocked = Blocked(getattr(where, name), lambda *given: "slow" in str(given) or "777" in str(given))
    monkeypatch.setattr(where, name, lambda *given, **options: blocked(*given, **options))
    slow_one = Caller(**inputs)
    thread = begin(serve.service, slow_one, blocked)
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    blocked.go_on.set()
    assert slow_one.all()
    thread.join(WAIT)


def test_a_response_that_is_slow_to_send_delays_no_other(serve):
    first = request_of("abcd")
    first.parameters = lambda: '{"sequence_id": 7, "sequence_start": true}'
    serve.service.submit(first)
    assert first.all()
    ends = Caller()
    ends.parameters = lambda: '{"sequence_id": 7, "sequence_end": true}'
    adapters = Caller(adapters=True)
    for caller in (ends, adapters):
        blocked = caller.send = Blocked(caller.send, lambda *given: True)
        thread = begin(serve.service, caller, blocked)
        assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
        blocked.go_on.set()
        assert caller.all()
        thread.join(WAIT)


def test_a_long_conversation_is_parsed_while_the_next_requests_are_admitted(serve, monkeypatch):
    """On the thread that the server passes requests on."""
    serve.service._assembly.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
    monkeypatch.setattr(admission, "LONG_CHARS", 1000)
    blocked = Blocked(wire_call.parse_json, lambda name, text: name == "messages")
    monkeypatch.setattr(wire_call, "parse_json", blocked)
    long = serve.call(messages=json.dumps([{"role": "user", "content": "a", "name": "b" * 300}]))
    assert blocked.begun.wait(WAIT)
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    blocked.go_on.set()
    assert long.all()


def test_a_prompt_does_not_wait_for_a_longer_one(serve, slow, monkeypatch):
    monkeypatch.setattr(admission, "SHORT_CHARS", 20)
    long = request_of(LONG)
    serve.service.submit(long)
    slow.began.get(timeout=WAIT)
    assert serve.ask(text_input="a" * 30, sampling_parameters='{"max_tokens": 1}')
    slow.go_on.set()
    assert long.all()


def test_a_cancelled_long_prompt_is_not_tokenized(serve, slow):
    first, cancelled = request_of(LONG), request_of(LONG, is_cancelled=True)
    serve.service.submit(first)
    slow.began.get(timeout=WAIT)
    serve.service.submit(cancelled)
    assert "CANCELLED" in cancelled.rejection()  # before its turn to be tokenized
    slow.go_on.set()
    assert first.all()
    assert slow.began.empty()
    until(lambda: len(serve.outcomes) == 2)
    assert set(serve.outcomes) == {"length", "cancelled"}


def test_stop_request_finds_a_long_prompt(serve, slow):
    long = request_of(LONG, request_id="a")
    serve.service.submit(long)
    slow.began.get(timeout=WAIT)
    stop = Caller(stop_request=True)
    stop.request_id = lambda: "a"
    serve.service.submit(stop)
    assert stop.all() == [{"num_stopped": [1]}]
    assert "CANCELLED" in long.rejection()  # at once
    slow.go_on.set()
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')


HOUR = 3_600_000  # milliseconds


@pytest.fixture
def advance_an_hour(monkeypatch):
    """Return a function that advances the responder's clock by an hour."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(responder, "time", clock)
    return lambda: ahead.append(ahead.pop() + HOUR / 1e3)


def request_with_timeout(**more):
    returned = {"return_finish_reason": True, "return_num_output_tokens": True}
    return Caller(text_input=LONG, sampling_parameters=json.dumps({"timeout_ms": HOUR} | more), **returned)


@pytest.mark.parametrize("limit", ["timeout_ms", "timeout"])
def test_a_long_prompt_times_out_before_it_is_tokenized(serve, slow, advance_an_hour, limit):
    """One prompt is being tokenized, the other waits for it."""
    waiting = (
        [request_with_timeout(), request_with_timeout()]
        if limit == "timeout_ms"
        else [request_of(LONG, timeout=HOUR * 1000) for _ in "ab"]
    )
    for one in waiting:
        serve.service.submit(one)
    slow.began.get(timeout=WAIT)
    advance_an_hour()
    for one in waiting:
        (answer,) = one.all()
        if limit == "timeout_ms":
            assert (answer["finish_reason"], answer["num_output_tokens"]) == ([b"timeout"], [0])
    until(lambda: len(serve.outcomes) == 2)
    assert serve.outcomes == ["timeout"] * 2
    assert (
        "2 requests wait (max_queue_size)" in serve.call(text_input="abcd").rejection()
    )  # their texts are still in memory
    slow.go_on.set()
    until(lambda: not serve.service._admission.long_prompts.pending)
    assert serve.ask(text_input="abcd", sampling_parameters='{"max_tokens": 1}')
    assert slow.began.empty()


def test_a_turn_that_ends_before_tokenization_restores_its_session(serve, slow, advance_an_hour):
    def turn(caller, **more):
        caller.parameters = lambda: json.dumps({"sequence_id": 7} | more)
        serve.service.submit(caller)
        return caller

    assert turn(request_of("abcd"), sequence_start=True).all()
    long = turn(request_with_timeout())
    slow.began.get(timeout=WAIT)
    advance_an_hour()
    assert long.all()[0]["finish_reason"] == [b"timeout"]
    after = Caller(text_input="ef", sampling_parameters='{"max_tokens": 1}', return_num_input_tokens=True)
    assert turn(after).all()[0]["num_input_tokens"][0] > len(byte_tokenizer().encode("ef"))
    slow.go_on.set()
    assert turn(request_of("gh")).all()


def test_a_failed_long_prompt_restores_its_session(serve, slow, monkeypatch):
    def turn(text, **more):
        caller = request_of(text)
        caller.parameters = lambda: json.dumps({"sequence_id": 7} | more)
        return caller

    first = turn("abcd", sequence_start=True)
    serve.service.submit(first)
    assert first.all()
    with monkeypatch.context() as patch:
        patch.setattr(PromptProcess, "encode", lambda self, prompt: 1 / 0)
        failing = turn(LONG)
        serve.service.submit(failing)
        assert "ZeroDivisionError" in failing.rejection()
    after = turn("ef")
    serve.service.submit(after)
    assert after.all()


@pytest.mark.parametrize("texts", [{"text_input": LONG}, {"messages": json.dumps([{"role": "user", "content": LONG}])}])
def test_a_long_prompt_is_encoded_like_a_short_one(tiny, texts, monkeypatch):
    """The error for too many tokens shows that all of its text was tokenized."""
    monkeypatch.setattr(admission, "SHORT_CHARS", 200)
    monkeypatch.setattr(admission, "LONG_CHARS", 200)
    monkeypatch.setattr(admission, "TOKEN_CHARS", 0)  # a process that starts before would miss the template
    with serving(tiny[0]) as server:
        server.service._assembly.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
        assert f"prompt_tokens={len(byte_tokenizer().encode(LONG))}: must be" in server.call(**texts).rejection()


def test_prompts_above_65536_characters_are_encoded_in_another_process(tiny, monkeypatch):
    lengths = []

    def encode(self, prompt):
        lengths.append(len(prompt.call.unread["messages"]))
        return EncodedPrompt([1])

    monkeypatch.setattr(PromptProcess, "encode", encode)
    empty = len(json.dumps([{"role": "user", "content": ""}]))
    with serving(tiny[0]) as server:
        server.service._assembly.loaded.tokenizer.chat_template = "{{ messages[0].content }}"
        for length in (65_536, 65_537):
            turns = json.dumps([{"role": "user", "content": "a" * (length - empty)}])
            caller = server.call(messages=turns, sampling_parameters='{"max_tokens": 1}')
            assert caller.all() if length == 65_537 else caller.rejection()
    assert lengths == [65_537]


@pytest.mark.parametrize("chars", [200, 5000])
def test_the_process_starts_before_the_first_prompt_if_long_prompts_fit(tiny, monkeypatch, chars):
    starts = SimpleQueue()
    monkeypatch.setattr(admission, "LONG_CHARS", chars)
    monkeypatch.setattr(PromptProcess, "start", lambda self: starts.put(True))
    with serving(tiny[0]) as server:
        assert server.ask(text_input="a", sampling_parameters='{"max_tokens": 1}')
        if chars == 200:  # the context has 256 tokens
            assert starts.get(timeout=WAIT)
    assert starts.empty()


def latencies(server, arrivals, seconds):
    """Return the sorted latencies of small requests, one after the other."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began, small = time.monotonic(), request_of("abcd")
        arrivals.put(small)
        assert small.all()
        found.append(time.monotonic() - began)
    return sorted(found)


@pytest.mark.nightly
def test_small_requests_beside_conversations_of_megabytes(tiny, figures):
    """50 clients send 8 MB each, on the one thread that the server has for requests. While they were parsed there, a
    small request took 16 seconds."""
    turns = json.dumps([{"role": "user", "content": "hello world " * 320}] * 2040).encode()
    arrivals, over = SimpleQueue(), threading.Event()
    with serving(tiny[0]) as server:
        server.service._assembly.loaded.tokenizer.chat_template = (
            "{% for one in messages %}{{ one.content }}{% endfor %}"
        )

        def pass_on():
            while request := arrivals.get():
                server.service.submit(request)

        def send():
            while not over.is_set():
                large = Caller(messages=turns)
                arrivals.put(large)
                assert "must be at most" in large.get(timeout=10 * WAIT)[1]

        passing = threading.Thread(target=pass_on)
        passing.start()
        alone = latencies(server, arrivals, 5)
        clients = [threading.Thread(target=send) for _ in range(50)]
        for client in clients:
            client.start()
        beside = latencies(server, arrivals, 20)
        over.set()
        for client in clients:
            client.join()
        arrivals.put(None)
        passing.join()
    p99 = [times[int(0.99 * len(times))] for times in (alone, beside)]
    figures(f"99th percentile {1e3 * p99[0]:.0f} ms alone, {1e3 * p99[1]:.0f} ms beside {len(clients)} clients")
    assert p99[1] < 2 + 10 * p99[0]
