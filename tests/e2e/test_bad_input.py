"""Bad input: every request is answered with an error that names the problem, and other clients are not affected."""

import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2_grpc

from tests.support.bad_input import GOOD, Body, body, message
from tests.support.gateway import error_of, gateway
from tests.support.stress import table
from tests.support.triton import MODEL, idle, post, raw_stream

ANSWER = 5  # seconds until a response must arrive
WORKERS = 4  # number per protocol
CLASSES = r"INVALID_ARGUMENT|UNAVAILABLE|CANCELLED|DEADLINE_EXCEEDED"
OURS = re.compile(rf"(Error generating stream: )?({CLASSES}): |Error generating stream: When streaming|LoRA feature")
# Errors of tritonserver itself, before the model gets the request.
CORE = re.compile(
    r"(\[request id: .*\] )?(Unable to parse|failed to parse the request JSON|expected"
    "|unexpected (inference|shape|number of)|generate expects model to produce exactly 1 response"
    "|inference input '.*' data-type|incomplete string|input byte size|Request for unknown model|All input dimensions"
    "|invalid value|failed to get model version|The schema can not convert"
    "|parameter (key )?'.*' (has invalid type|was not found))"
)


def classify(text):
    """Return the class of an error, or which server component it is from; None for an unknown error."""
    bare = text.removeprefix("data: ").removeprefix('{"error":"')
    return "ours" if OURS.match(bare) else "core" if CORE.match(bare) else None


class OverHttp:
    def __init__(self, server):
        self._connection = http.client.HTTPConnection("localhost", server.http_port, timeout=ANSWER)

    make = staticmethod(body)

    def ask(self, asked: Body):
        """Return the error of the response, or None."""
        self._connection.request("POST", f"/v2/models/{MODEL}/{asked.endpoint}", asked.data)
        reply = self._connection.getresponse()
        text = reply.read().decode(errors="replace")
        return text if reply.status != 200 or '"error":' in text else None

    def close(self):
        self._connection.close()


class OverGrpc:
    """Uses a stream per request and never cancels one.

    tritonserver 2.51 sometimes crashes while it writes an error to a stream of many requests, and does not stop after a
    request that it rejected is cancelled.
    """

    def __init__(self, server):
        self._channel = grpc.insecure_channel(server.grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    @staticmethod
    def make(rng):
        return message(rng, MODEL)

    def ask(self, asked):
        replies = list(self._stub.ModelStreamInfer(iter([asked.request]), timeout=ANSWER))
        assert replies, "a stream that ended without an answer"
        return next((reply.error_message for reply in replies if reply.error_message), None)

    def close(self):
        self._channel.close()


class StressTest:
    """Sends bad requests from several clients until enough have been rejected."""

    def __init__(self, server, count, seed, until=None):
        self.server, self.count, self.seed = server, count, seed
        self.until = until  # time.monotonic()
        self.found, self.faults = Counter(), []
        self._lock = threading.Lock()

    @property
    def over(self):
        late = self.until is not None and time.monotonic() > self.until
        return late or bool(self.faults) or self.found["ours"] + self.found["core"] >= self.count

    def work(self, kind, index):
        rng, client = random.Random(f"{self.seed} {kind.__name__} {index}"), kind(self.server)
        try:
            while not self.over:
                asked = client.make(rng)
                self.book(kind, asked, self._ask(client, asked))
        finally:
            client.close()

    def _ask(self, client, asked):
        try:
            error = client.ask(asked)
        except Exception as caught:  # no response in time, or the connection was lost
            return None, f"{type(caught).__name__}: {caught}"
        return ("good", "") if error is None else (classify(error), error)

    def book(self, kind, asked, answer):
        outcome, text = answer
        with self._lock:
            self.found[outcome] += 1
            self.found[kind.__name__] += 1
            if outcome is None:
                self.faults.append((str(asked)[:2000], text[:1000]))


@contextmanager
def undisturbed(server):
    """Run a client whose output must not change."""
    over, asked = threading.Event(), GOOD | {"max_tokens": 6, "ignore_eos": True}
    expected, answers = post(server, asked), []

    def ask():
        while not over.is_set():
            answers.append(post(server, asked))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
            asking.result()
    assert expected[0] == 200
    assert answers and set(answers) == {expected}


def send_bad_requests(server, count, seed, until=None):
    made, pid = StressTest(server, count, seed, until), server.pid
    with undisturbed(server), ThreadPoolExecutor(2 * WORKERS) as pool:
        working = [pool.submit(made.work, kind, index) for kind in (OverHttp, OverGrpc) for index in range(WORKERS)]
        for one in working:
            one.result()
    refused = made.found["ours"] + made.found["core"]
    table.record("bad requests", refused)
    table.record("bad requests without an error class", len(made.faults), of=refused)
    assert made.faults == []
    idle(server)
    assert server.pid == pid
    assert post(server, GOOD)[0] == 200
    return made.found


def test_bad_requests_are_rejected_with_the_reason(tiny_server):
    found = send_bad_requests(tiny_server, 600, seed=os.environ.get("PAGED_TEST_SEED", "1"))
    assert found["ours"] > 120 and found["core"] > 60


@pytest.mark.nightly
def test_a_million_bad_requests(tiny_server, figures, until):
    """Sends as many as there is time for."""
    seed = time.time()
    figures(f"seed {seed}: {dict(send_bad_requests(tiny_server, 1_000_000, seed=seed, until=until))}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(("text_input", "sampling_parameters", "messages", "stop", "logit_bias", "regex", "n"))


@seed(1)
@settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(changes=st.dictionaries(NAMES | st.text(max_size=8), JSON, min_size=1, max_size=3), inside=st.booleans())
def test_any_json_gets_a_response(tiny_server, changes, inside):
    sent = GOOD | ({"sampling_parameters": json.dumps(changes)} if inside else changes)
    status, text = post(tiny_server, sent)
    assert status == 200 or classify(text), text


HUGE = [  # over gRPC only: over HTTP, bodies of megabytes crash tritonserver 2.51 before the model gets them
    ({"text_input": "a" * (70 << 20)}, "text_input: 73400320 characters; must be at most"),
    ({"sampling_parameters": "[" * (9 << 20)}, "(max_sampling_chars)"),
    ({"sampling_parameters": "[" * (1 << 20)}, "sampling_parameters: not valid JSON"),
    ({"sampling_parameters": json.dumps({"x" * (1 << 19): 1})}, "unknown sampling parameter"),
    ({"sampling_parameters": json.dumps({"cache_salt": "a" * (1 << 19)})}, "(max_salt_bytes)"),
    ({"sampling_parameters": json.dumps({"stop": ["a"] * 100_000})}, "(max_stop_strings)"),
    ({"regex": "a" * (20 << 20)}, "(max_structure_bytes)"),
]


def to_gateway(**fields):
    return json.dumps({"model": MODEL, "prompt": "a"} | fields).encode()


DEEP = 200_000
# For the gateway, over HTTP, with the beginning of its error. It does not read larger bodies
# (tests/client/openai/test_app.py).
BEFORE_THE_SERVER = [
    (to_gateway(prompt="a" * ((10 << 20) - 100)), "prompt: text_input: 10485660 characters; must be at most"),
    (b'{"model": "paged_llm", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", "the body has more than 131072 lists a"),
    (b'{"x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}", "the body has more than 131072 lists a"),
    (to_gateway(json_schema="[" * DEEP + "]" * DEEP), "json_schema="),
    (to_gateway(logit_bias=dict.fromkeys(map(str, range(50_000)), 1)), "logit_bias="),
]


def test_the_gateway_blocks_input_that_crashes_a_server(tiny_server):
    pid = tiny_server.pid
    with gateway(tiny_server.grpc_url) as front, undisturbed(tiny_server):
        for data, reason in BEFORE_THE_SERVER:
            status, answer = front.ask("/v1/completions", data)
            assert (status, error_of(status, answer)["message"][: len(reason)]) == (400, reason)
            assert len(answer["error"]["message"]) < 1000
        assert front.ask("/v1/completions", {"model": "paged_llm", "prompt": "abcd", "max_tokens": 2})[0] == 200
    idle(tiny_server)
    assert tiny_server.pid == pid


def test_huge_input_is_rejected(tiny_server):
    with undisturbed(tiny_server), raw_stream(tiny_server) as stream:
        for change, reason in HUGE:
            stream.send(**{"text_input": "abcd"} | change)
            said = str(stream.next().error)
            assert reason in said
            assert len(said) < 1000
    idle(tiny_server)
