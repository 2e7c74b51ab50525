"""Requests move to the instance that replaces theirs, and their streams continue."""

import json
import shutil
import threading
import time
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from paged_backend.api.config import EngineConfig
from paged_backend.execution.runner import Runner
from paged_backend.server.connections import migration
from paged_backend.server.connections.listener import Listener
from paged_backend.server.connections.migration import MAX_ATTEMPTS, Description, Successors, fingerprint
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection, FrameError, pack
from tests.support.callers import serving
from tests.support.in_process import TINY, tiny_assembly
from tests.support.service_calls import SingleCaller, counted
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("socket_directory")

TEXTS = ["abcd", "the second", "3", "x" * 30]
LONG = {"max_tokens": 50, "ignore_eos": True, "temperature": 1.0}
RETURNED = {"return_finish_reason": True, "return_num_output_tokens": True, "return_logprobs": True}


class Slow:
    """Steps take a while, so that requests can be moved between them."""

    def __init__(self, monkeypatch):
        self.seconds, launch = 0.0, Runner.launch

        def slow(runner, packed):
            time.sleep(self.seconds)
            return launch(runner, packed)

        monkeypatch.setattr(Runner, "launch", slow)


@pytest.fixture
def slow(monkeypatch):
    return Slow(monkeypatch)


def ask(service, text, own=None, **sampling):
    return SingleCaller(
        service, own, text_input=text, stream=True, sampling_parameters=json.dumps(sampling), **RETURNED
    )


def text_of(responses):
    return "".join(one["text_output"][0].decode(errors="surrogateescape") for one in responses)


def reason(responses):
    return responses[-1]["finish_reason"][0].decode()


def moved(service):
    """The number of requests of a service that another one runs."""
    return len(service._router._routes)


def serve(tiny, **options):
    return serving(tiny[0], instance="tiny_0_0", **{"num_gpu_blocks_override": 256} | options)


def test_streams_continue_in_the_new_instance(tiny, slow, monkeypatch):
    """And are counted."""
    moves = counted(monkeypatch, "moved")
    with serve(tiny) as first:
        sampling = [LONG | {"seed": seed} for seed in range(len(TEXTS))]
        sampling[1] |= {"stop": ["zz"], "n": 2}
        sampling[2] |= {"repetition_penalty": 1.2, "logprobs": 2}
        expected = [ask(first.service, text, **one).all() for text, one in zip(TEXTS, sampling, strict=True)]
        slow.seconds = 0.06
        streams = [ask(first.service, text, **one) for text, one in zip(TEXTS, sampling, strict=True)]
        began = [stream.get(timeout=60) for stream in streams]
        with serve(tiny) as second:
            until(lambda: moved(first.service) == len(TEXTS), "moved requests")
            until(lambda: second.service._engine_service.num_open == len(TEXTS), "requests of the first instance")
            slow.seconds = 0.0
            for stream, start, whole in zip(streams, began, expected, strict=True):
                rest = stream.all()
                assert text_of([start[0], *rest]) == text_of(whole)
                assert reason(rest) == reason(whole)
            assert moved(first.service) == 0 and second.service._engine_service.num_open == 0
            assert not first.service._engine.num_open
    assert len(moves) == len(TEXTS)


def test_structured_output_and_beams_continue(tiny, slow):
    with serve(tiny, structured_outputs_timeout=60) as first:
        sampling = [
            {"regex": "[a-c]{40}", "temperature": 1.0, "seed": 4, "max_tokens": 50},
            {"beam_width": 2, "max_tokens": 30, "temperature": 0, "ignore_eos": True},
        ]
        expected = [ask(first.service, "abcd", **one).all() for one in sampling]
        slow.seconds = 0.06
        streams = [ask(first.service, "abcd", **one) for one in sampling]
        with serve(tiny, structured_outputs_timeout=60) as second:
            until(lambda: moved(first.service), "moved requests")
            slow.seconds = 0.0
            for stream, whole in zip(streams, expected, strict=True):
                assert text_of(stream.all()) == text_of(whole)
            assert second.service._engine_service.num_open == 0


def test_moved_requests_are_cancelled_stopped_and_time_out(tiny, slow):
    with serve(tiny) as first:
        slow.seconds = 0.06
        cancelled = ask(first.service, "a", **LONG)
        timed = ask(first.service, "b", **LONG | {"timeout_ms": 3_600_000})
        ended = ask(first.service, "c", {"request_id": "c"}, **LONG)
        with serve(tiny) as second:
            until(lambda: moved(first.service) == 3, "moved requests")
            served = second.service._engine_service
            cancelled.is_cancelled = lambda: True
            until(lambda: served.num_open == 2, "a request that was cancelled")
            SingleCaller(first.service, {"request_id": "c"}, stop_request=True)
            until(lambda: served.num_open == 1, "a request that was stopped")
            (stream,) = [one for one in first.service._responder.streams.values() if not one.ended]
            stream.deadline = 0.0
            until(lambda: served.num_open == 0, "a request whose deadline has passed")
            assert reason(timed.all()) == "timeout"
            assert "CANCELLED" in next(error for _, error, _ in _drain(ended) if error)
            until(lambda: not second.service._assembly.scheduler.has_work, "a free engine")
            slow.seconds = 0.0


def test_requests_return_when_the_new_instance_is_unloaded(tiny, slow, monkeypatch):
    """The memory of the first instance was released meanwhile."""
    monkeypatch.setattr(migration, "RELEASE_SECONDS", 0.0)
    with serve(tiny) as first:
        expected = ask(first.service, "abcd", seed=1, **LONG).all()
        slow.seconds = 0.06
        stream = ask(first.service, "abcd", seed=1, **LONG)
        with serve(tiny):
            until(lambda: moved(first.service) == 1, "a moved request")
            until(lambda: first.service._assembly.model_memory.released, "released memory")
        assert moved(first.service) == 0
        until(lambda: not first.service._assembly.model_memory.released, "memory for the request")
        slow.seconds = 0.0
        assert text_of(stream.all()) == text_of(expected)


def test_requests_move_on_to_the_newest_instance(tiny, slow, monkeypatch):
    """Each move is counted."""
    moves = counted(monkeypatch, "moved")
    with serve(tiny) as first:
        expected = ask(first.service, "abcd", seed=1, **LONG).all()
        slow.seconds = 0.06
        stream = ask(first.service, "abcd", seed=1, **LONG)
        with serve(tiny) as second:
            until(lambda: second.service._engine_service.num_open, "a moved request")
            with serve(tiny) as third:
                until(lambda: third.service._engine_service.num_open, "a request that was moved on")
                assert second.service._engine_service.num_open == 0 and moved(second.service) == 0
                slow.seconds = 0.0
                assert text_of(stream.all()) == text_of(expected)
                for service in (second.service, third.service):  # it continued from the blocks of the one before
                    assert service._assembly.scheduler.stats.cached_tokens
    assert len(moves) == 2


def test_turn_of_a_session_moves(tiny, slow):
    """The text of the session stays in the first instance."""

    def turns(service, second_instance):
        own = {"correlation_id": 7, "flags": 1}
        slow.seconds = 0.06 if second_instance else 0.0
        first = ask(service, "abcd", own, seed=1, **LONG | {"max_tokens": 40})
        if second_instance:
            until(lambda: moved(service) == 1, "a moved request")
        slow.seconds = 0.0
        texts = [text_of(first.all())]
        last = ask(service, "more", own | {"flags": 2}, seed=1, **LONG | {"max_tokens": 8})
        return [*texts, text_of(last.all())]

    with serve(tiny) as first:
        expected = turns(first.service, False)
        with serve(tiny) as second:
            assert turns(first.service, True) == expected
            assert second.service._assembly.scheduler.pins.num_pages == 0


@pytest.mark.parametrize("difference", ["instance", "options"])
def test_requests_stay_if_the_other_instance_is_no_successor(tiny, slow, difference):
    """An instance of another name is of the same instance group; with other options the tokens might differ."""
    with serve(tiny) as first:
        slow.seconds = 0.03
        stream = ask(first.service, "abcd", **LONG)
        other = {"instance": "tiny_0_1"} if difference == "instance" else {"instance": "tiny_0_0", "block_size": 8}
        with serving(tiny[0], num_gpu_blocks_override=256, **other):
            time.sleep(4 * migration.POLL_SECONDS)
            assert moved(first.service) == 0
            slow.seconds = 0.0
            assert reason(stream.all()) == "length"


def test_request_stays_if_the_new_instance_cannot_run_it(tiny, slow, monkeypatch):
    moves = counted(monkeypatch, "moved")
    with serve(tiny) as first:
        slow.seconds = 0.06
        stream = ask(first.service, "abcd", **LONG)
        with serve(tiny, max_model_len=40):
            until(lambda: any(group.request.stays for group in first.service._assembly.scheduler.running))
            slow.seconds = 0.0
            assert reason(stream.all()) == "length"
    assert moves == []


def test_streams_fail_with_one_error_if_the_new_instance_dies(tiny, slow):
    with serve(tiny) as first:
        slow.seconds = 0.06
        stream = ask(first.service, "abcd", **LONG)
        with serve(tiny):
            until(lambda: moved(first.service) == 1, "a moved request")
            (engine,) = first.service._migration._engines.values()
            (request,) = engine._open.values()
            until(lambda: request.answered, "a token of the new instance")
            engine.close()  # as if its process had ended
            errors = [error for _, error, _ in _drain(stream) if error]
            assert len(errors) == 1 and "UNAVAILABLE: the instance" in errors[0]
            slow.seconds = 0.0


def _drain(stream):
    """Return all responses up to the last."""
    found = [stream.get(timeout=60)]
    while not found[-1][2]:
        found.append(stream.get(timeout=60))
    return found


OWN = Description("1/m_0_0", 100, "abc")


@pytest.fixture
def listen():
    made = []

    def start(description, model="m"):
        values = description.write() if isinstance(description, Description) else description
        made.append(Listener(model, print, description=values))
        return made[-1].name

    yield start
    for listener in made:
        listener.close()


def test_the_newest_instance_of_the_same_name_and_fingerprint_is_the_successor(listen):
    own = listen(OWN)
    successors = Successors("m", own, OWN)
    assert successors.find() is None
    for other in (
        replace(OWN, started=99),
        replace(OWN, started=101, instance="1/m_0_1"),
        replace(OWN, started=101, instance="2/m_0_0"),
        replace(OWN, started=101, fingerprint="abd"),
        None,
        {"instance": "1/m_0_0"},
    ):
        listen(other)
    listen(replace(OWN, started=101), model="other")
    assert successors.find() is None
    first = listen(replace(OWN, started=101))
    assert successors.find() == first
    second = listen(replace(OWN, started=102))
    assert successors.find() == second
    successors.exclude(second)
    assert successors.find() == first
    local_socket.remove(first)
    assert successors.find() is None


def test_an_instance_that_does_not_answer_is_asked_three_times(listen):
    successors, asked = Successors("m", "own", OWN), []
    end, _ = local_socket.listen("m")

    def refuse():
        while True:
            peer, _ = end.accept()
            asked.append(peer)
            peer.close()

    threading.Thread(target=refuse, daemon=True).start()
    for _ in range(5):
        assert successors.find() is None
    assert len(asked) == MAX_ATTEMPTS


@pytest.mark.parametrize("value", [None, [], {}, {"instance": "a", "started": 1.5, "fingerprint": "b"}])
def test_invalid_description_is_an_error_of_the_frame(value):
    with pytest.raises(FrameError):
        Description.read(value)


def test_an_instance_describes_itself_if_asked_to(listen):
    connection = Connection(local_socket.connect(listen(OWN)))
    frames = connection.frames()
    for value, answer in ((True, {"describe": OWN.write()}), (1, None), ("yes", None)):
        connection.send(pack({"id": 3, "describe": value}))
        found = next(frames)
        assert found.pop("id") == 3
        assert found == answer if isinstance(answer, dict) else found["error"]["code"] == "INVALID_ARGUMENT"


def fingerprint_of(directory, **options):
    config = EngineConfig.from_options({"model": str(directory)} | TINY | options)
    assembly = tiny_assembly(directory, **options)
    return fingerprint(config, assembly.loaded, assembly.limits)


def test_fingerprint_depends_on_what_changes_tokens(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    same = fingerprint_of(tmp_path)
    assert same == fingerprint_of(tmp_path, num_gpu_blocks_override=80, max_num_seqs=4, enable_prefix_caching=False)
    assert same != fingerprint_of(tmp_path, dtype="bfloat16")
    assert same != fingerprint_of(tmp_path, block_size=8)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"@")
    assert same != fingerprint_of(tmp_path)


def test_fingerprint_depends_on_the_tokenizer_and_its_vocabulary(tiny, tmp_path):
    shutil.copytree(tiny[0], tmp_path, dirs_exist_ok=True)
    same = fingerprint_of(tiny[0], tokenizer=str(tmp_path))
    assert same != fingerprint_of(tiny[0])
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(file))
    assert same != fingerprint_of(tiny[0], tokenizer=str(tmp_path))


@pytest.mark.parametrize("options", [{"quantized_activations": "none"}])
def test_fingerprint_depends_on_rounding(tiny, options):
    assert fingerprint_of(tiny[0]) != fingerprint_of(tiny[0], **options)
