"""An engine in another process: `RemoteEngine` over a connection to the `EngineService` of a real engine."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from paged_backend.api.errors import ErrorCode
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.token_outputs import requested_outputs
from paged_backend.engine.engine_service import EngineService
from paged_backend.engine.remote_engine import RemoteEngine
from paged_backend.engine.router import Router
from paged_backend.utils.local_socket import FrameError, pack
from tests.support.in_process import Output, tiny_assembly
from tests.support.remote_engines import Owner, Peer, pair
from tests.support.waiting import WAIT, until

PROMPT = list(range(5, 25))


class Client:
    """An engine, by default a remote one, and the outputs that it emits, by request and sample."""

    def __init__(self, connection, limits):
        self.owner, self.emitted, self.outputs, self.limits = Owner(), SimpleQueue(), {}, limits
        if connection:
            self.engine = RemoteEngine("other", connection, self.emitted.put, self.owner)

    def submit(self, key, **sampling):
        params = SamplingParams.parse({"temperature": 0, "ignore_eos": True} | sampling, self.limits)
        request = GenerateRequest.from_prompt(key, PROMPT, params, params.seed or 0, frozenset(), self.limits)
        self.engine.submit(replace(request, token_outputs=requested_outputs(["logprobs"], params)))

    def step(self):
        output = self.emitted.get(timeout=WAIT)
        for delta in output.deltas:
            one = self.outputs.setdefault((delta.key, delta.sample), Output())
            assert one.finish is None and one.error is None
            one.tokens += delta.token_ids
            one.logprobs += delta.values.get("logprobs", ())
            one.finish, one.error = delta.finish, delta.error
        return output

    def wait(self, *keys):
        while not all((one := self.outputs.get(key)) and (one.finish or one.error) for key in keys):
            self.step()
        return [self.outputs[key] for key in keys]


@contextmanager
def connected(assembly):
    near, far = pair()
    peer = Peer(assembly, far)
    peer.engine.start()
    client = Client(near, assembly.limits)
    try:
        yield client, peer
    finally:
        client.engine.close()
        until(lambda: not peer.service.num_open, "no request of the connection that has ended")
        peer.engine.stop()
    assert assembly.scheduler.blocks.num_used == 0 and not assembly.scheduler.has_work


@pytest.fixture(scope="module")
def assembly(tiny):
    return tiny_assembly(tiny[0], num_gpu_blocks_override=256)


def test_outputs_are_those_of_a_local_engine(assembly):
    with connected(assembly) as (client, peer):
        client.submit(1, max_tokens=12, logprobs=1)
        client.submit(2, max_tokens=9, temperature=1.0, seed=4, n=2)
        remote = client.wait((1, 0), (2, 0), (2, 1))
        assert sorted(client.owner.ended) == [1, 2] and client.engine.num_open == 0
        assert peer.service.num_open == 0
    local = Client(None, assembly.limits)
    local.engine = assembly.engine(local.emitted.put)
    local.engine.start()
    local.submit(1, max_tokens=12, logprobs=1)
    local.submit(2, max_tokens=9, temperature=1.0, seed=4, n=2)
    for one, other in zip(remote, local.wait((1, 0), (2, 0), (2, 1)), strict=True):
        assert one.tokens == other.tokens and one.finish is other.finish
    local.engine.stop()
    assert [len(row) for row in remote[0].logprobs] == [len(row) for row in local.outputs[1, 0].logprobs]
    for (chosen, *_), (expected, *_) in zip(remote[0].logprobs, local.outputs[1, 0].logprobs, strict=True):
        assert chosen.token == expected.token and chosen.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_request_that_cannot_run_is_returned(assembly):
    with connected(assembly) as (client, _):
        client.limits = replace(assembly.limits, max_model_len=10_000, num_pages=10_000)
        client.submit(1, max_tokens=5000)
        request, rejected = client.owner.returned.get(timeout=WAIT)
        assert request.key == 1 and "max_tokens" in rejected
        assert client.engine.num_open == 0


def test_request_is_given_back_with_its_progress(assembly):
    with connected(assembly) as (client, peer):
        client.submit(1, max_tokens=200, temperature=1.0, n=2)
        while len(client.outputs.get((1, 1), Output()).tokens) < 3:
            client.step()
        client.engine.end(1, 0)
        Router(peer.engine).take_out(lambda request: True, lambda request, blocks: peer.service.give_back(request.key))
        request, rejected = client.owner.returned.get(timeout=WAIT)
        while not client.emitted.empty():
            client.step()
        assert rejected is None
        assert request.progress.outputs == (None, tuple(client.outputs[1, 1].tokens))


def test_requests_are_ended(assembly):
    with connected(assembly) as (client, peer):
        for key in range(3):
            client.submit(key, max_tokens=200, n=2)
        client.step()
        client.engine.abort(0)
        client.engine.end_all(1)
        client.engine.end(2, 0)
        client.engine.end(2, 1)
        until(lambda: peer.service.num_open == 0, "the end of all requests")
        until(lambda: not assembly.scheduler.has_work, "an idle engine")
        assert client.engine.num_open == 0


def test_beam_search_is_expired(assembly):
    with connected(assembly) as (client, _):
        client.submit(1, max_tokens=200, beam_width=2)
        client.engine.expire(1)
        (output,) = client.wait((1, 0))
        assert output.finish


def test_requests_of_an_engine_that_dies_fail(assembly):
    with connected(assembly) as (client, peer):
        client.submit(1, max_tokens=200)
        until(lambda: peer.service.num_open, "the request")
        peer.engine.fail("a rank has ended")
        (output,) = client.wait((1, 0))
        assert output.error.code is ErrorCode.UNAVAILABLE and "a rank has ended" in str(output.error)
        for group in (*assembly.scheduler.running, *assembly.scheduler.waiting):
            assembly.scheduler.abort(group.key)


@pytest.mark.parametrize(
    "frame",
    [
        {"frob": 1},
        {"id": "x", "returned": "moved"},
        {"id": 1, "returned": "eaten"},
        {"step": {"deltas": [], "entered": []}},
        {"step": {"deltas": 1, "entered": [], "started_at": 1.0, "finished_at": 1.0}},
        {"step": {"deltas": [{"id": 1}], "entered": [], "started_at": 1.0, "finished_at": 1.0}},
        {
            "step": {
                "deltas": [{"id": 1, "tokens": [], "sample": 3}],
                "entered": [],
                "started_at": 1.0,
                "finished_at": 1.0,
            }
        },
        {"step": {"deltas": [], "entered": [[]], "started_at": 1.0, "finished_at": 1.0}},
    ],
)
def test_invalid_frame_ends_the_connection_and_fails_its_requests_once(assembly, frame):
    near, far = pair()
    client = Client(near, assembly.limits)
    client.submit(7, max_tokens=5)
    frames = far.frames()
    assert next(frames)["generate"]["prompt"] == PROMPT
    step = {"deltas": [{"id": 1, "tokens": [4]}], "entered": [1], "started_at": 1.0, "finished_at": 1.0}
    far.send(pack({"step": step}))
    far.send(pack(frame))
    (output,) = client.wait((7, 0))
    assert output.error.code is ErrorCode.UNAVAILABLE
    assert list(frames) == [] and not client.engine.alive
    assert client.owner.ended == [7]


@pytest.mark.parametrize("frame", [None, {"refused": "too many connections"}])
def test_requests_that_were_not_answered_are_returned(assembly, frame):
    near, far = pair()
    client = Client(near, assembly.limits)
    client.submit(7, max_tokens=5)
    if frame:
        far.send(pack(frame))
    far.close()
    until(lambda: not client.engine.alive, "the end of the connection")
    client.submit(8, max_tokens=5)  # after the end
    returned = [client.owner.returned.get(timeout=WAIT) for _ in range(2)]
    assert sorted((request.key, rejected) for request, rejected in returned) == [(7, None), (8, None)]


def test_requests_of_other_processes_do_not_count_as_waiting(assembly):
    with connected(assembly) as (client, peer):
        for key in range(20):  # more than run at once
            client.submit(key, max_tokens=200)
        until(lambda: peer.service.num_open == 20, "all requests")
        assert peer.engine.waiting == 0


def test_a_connection_may_end_while_its_first_request_arrives(assembly, monkeypatch):
    _near, far = pair()
    remote = EngineService(assembly.limits, assembly.loaded.tokenizer, print).connect(far.send, far.close, 1000)
    start, begins, may_start = threading.Thread.start, threading.Event(), threading.Event()

    def start_late(thread):
        if thread.name == "remote client":
            begins.set()
            may_start.wait(WAIT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with ThreadPoolExecutor(2) as pool:
        request = pool.submit(remote.handle, 1, {"generate": {}})
        assert begins.wait(WAIT)
        ends = pool.submit(remote.flush)
        wait([ends], timeout=0.2)  # it waits for the thread that starts, or has failed by now
        may_start.set()
        ends.result()
        request.result()


def test_frame_of_the_client_with_an_invalid_value_is_an_error(assembly):
    near, far = pair()
    service = EngineService(assembly.limits, assembly.loaded.tokenizer, print)
    engine = assembly.engine(service.emit)
    remote = service.connect(far.send, far.close, far.max_frame_bytes)
    remote.handle(1, {"generate": {}})
    assert next(near.frames())["returned"] == "rejected"  # it accepts no requests
    service.start(engine, engine.deliver)
    with pytest.raises(FrameError):
        remote.handle(1, {"generate": {}})
    remote.handle(5, {"control": "abort"})  # it has ended
    assert not remote.handle(5, {"request": {}})
    request = {
        "prompt": PROMPT,
        "sampling": {"max_tokens": 5},
        "seed": 1,
        "stop_ids": [],
        "bad_words": [],
        "token_outputs": {},
    }
    remote.handle(2, {"generate": request | {"returns_usage": False}})
    for frame in ({"generate": request}, {"control": "pause"}, {"control": "end", "sample": "0"}):
        with pytest.raises(FrameError):
            remote.handle(2, frame)
    remote.close()
    assert service.num_open == 0
