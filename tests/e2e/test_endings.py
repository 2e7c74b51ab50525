"""Shutdown of a model on a real server: within its time limits, with one final response for every open request. Also:
jumps of the wall clock change nothing."""

import json
import shutil
import time
from contextlib import closing

import pytest
from tritonclient.utils import InferenceServerException

from paged_client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.stress.models import Models
from tests.support.stress.server import engine_alone
from tests.support.triton import MODEL, ONE_AT_A_TIME, REPOSITORY, idle, plain_server, post, raw_stream, tensors
from tests.support.trtllm_streams import ASKED, opened
from tests.support.waiting import until

LIMITS = {"dtype": "float32", "request_timeout": 4, "stop_timeout": 3}
SHORT = ASKED | {"max_tokens": [[12]]}
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def begun(stream, **sampling):
    stream.send(text_input="x", stream=True, sampling_parameters=LONG | sampling, return_finish_reason=True)
    first = stream.next()
    assert not first.error
    return first


def ends_at_its_time(stream):
    """The request ends once, with the output so far."""
    *_, last = stream.all()
    assert last.final and not last.error
    assert last.outputs["finish_reason"] == [b"timeout"]


@pytest.mark.nightly
def test_endless_requests_and_steps_do_not_block_shutdown(tiny, tmp_path):
    """SIGTERM ends the server with exit code 0. A request ends at its time limit with the output so far. One of a model
    that forwards to the engine has none: it fails, once, when the stop timeout is over.
    """
    stuck = faults.faulty_repository(tmp_path / "repository", {"stuck_step": 40})
    options = LIMITS | {"request_timeout": 0, "stop_timeout": 4}
    with (
        TritonServer(tiny[0], options, repository=stuck, server_args=[ONE_AT_A_TIME]) as server,
        opened(server, "ensemble") as relayed,
        raw_stream(server) as stream,
    ):
        relayed.send(**ASKED | {"max_tokens": [[200]]})
        relayed.next()
        begun(stream, timeout_ms=2000)
        server.terminate()
        ends_at_its_time(stream)
        stream.close()
        with pytest.raises(InferenceServerException, match=r"^UNAVAILABLE: the engine's model was unloaded, or has"):
            relayed.all()
        relayed.client.stop_stream()
        assert relayed.responses.empty()
        assert server.wait(60) == 0


GONE = "UNAVAILABLE: the engine's model, paged_llm, is not loaded"


def said(server):
    """Return the answer of the model that forwards to the engine's, or the error."""
    with opened(server, "ensemble") as stream:
        stream.send(**SHORT)
        try:
            return text_of(stream.all())
        except InferenceServerException as error:
            return error.message()


def text_of(parts):
    return b"".join(part["text_output"][0] for part in parts if "text_output" in part)


@pytest.mark.nightly
def test_the_engine_model_can_be_reloaded(tiny, tmp_path):
    """With explicit model control. Open requests end first: one whose step never ends at its time limit, and one that
    another model forwards to the engine.
    """
    repository = faults.inject_into_repository(engine_alone(tmp_path), {"slow_steps": 100, "stuck_step": 40})
    shutil.copytree(REPOSITORY / "ensemble", repository / "ensemble")
    (repository / MODEL / "1" / "model.json").write_text(json.dumps({"model": str(tiny[0])} | LIMITS))
    flags = ("--model-control-mode=explicit", "--load-model=ensemble", f"--load-model={MODEL}")
    with plain_server(repository, *flags) as server, closing(Models(server, repository)) as models:
        expected = said(server)
        with raw_stream(server) as stream:
            begun(stream)
            models.start_unloading()
            ends_at_its_time(stream)
            stream.close()
        models.unload()
        models.load()
        assert said(server) == expected
        with opened(server, "ensemble") as stream:
            stream.send(**SHORT)
            first, _ = stream.next()
            models.start_unloading()
            assert text_of([first, *stream.all()]) == expected
        until(lambda: said(server) == GONE, "an engine that is gone, some time after the server says so")
    assert isinstance(expected, bytes)


@pytest.mark.nightly
def test_wall_clock_jumps_do_not_affect_deadlines_sessions_or_queues(tiny, tmp_path):
    """The clock jumps an hour ahead or back with each request, and every limit is shorter."""
    options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 200, "max_num_seqs": 1}
    options |= {"request_timeout": 600, "session_ttl": 600, "stall_timeout": 600}
    returned = {"return_finish_reason": True, "return_receipt": True, "exclude_input_in_output": True}

    def ask(stream, number, **sampling):
        sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "timeout_ms": 600_000} | sampling
        inputs = tensors({"text_input": "one two", "sampling_parameters": sampling} | returned)
        flags = {"sequence_start": number == 0, "sequence_end": number == 3, "sequence_id": 0 if number is None else 7}
        stream.client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True, **flags)

    def answer(stream):
        (one,) = [one for one in stream.all() if one.outputs or one.error]
        assert not one.error, one.error
        assert one.outputs["finish_reason"] == [b"length"]
        receipt = json.loads(one.outputs["receipt"][0])
        assert all(0 <= value < 600 for name, value in receipt.items() if name.endswith("_seconds"))
        return one.text

    repository = faults.faulty_repository(tmp_path / "repository", {"wall_clock": 2})
    with (
        TritonServer(tiny[0], options, repository=repository, engine_only=True) as server,
        raw_stream(server) as stream,
    ):
        ask(stream, None)
        expected = answer(stream)
        hours = set()
        for turn in range(4):
            ask(stream, turn)  # begins a session while the clock is ahead; it ends while the clock is behind
            for _ in range(3):  # the first arrives while the clock is behind, and waits until it is ahead
                ask(stream, None)
            assert [answer(stream) for _ in range(4)][1:] == [expected] * 3
            ask(stream, None)
            answer(stream)
            told_now = json.loads(json.loads(post(server, {"pool_map": True})[1])["pool_map"])["time"]
            hours.add(round((told_now - time.time()) / 3600))
        assert hours <= {-1, 1} and hours
        idle(server)
