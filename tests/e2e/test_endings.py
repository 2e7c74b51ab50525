"""Shutdown of a model on a real server: within its time limits, with one final response for every open request. Also:
jumps of the wall clock change nothing."""

import json
import time
from contextlib import closing

import pytest
from tritonclient.utils import InferenceServerException

from paged_client.serving.tritonserver import TritonServer
from tests.support import faults
from tests.support.stress.models import Models
from tests.support.stress.server import engine_alone
from tests.support.triton import MODEL, idle, plain_server, post, raw_stream, tensors
from tests.support.trtllm_streams import ASKED, opened

LIMITS = {"dtype": "float32", "request_timeout": 4, "stop_timeout": 3}
STUCK = {"stuck_step": 40}  # its requests would never end
LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def stuck(tmp_path):
    """A model repository whose engine never finishes its 40th step."""
    return faults.faulty_repository(tmp_path / "repository", STUCK)


def begun(stream):
    stream.send(text_input="x", stream=True, sampling_parameters=LONG, return_finish_reason=True)
    first = stream.next()
    assert not first.error
    return first


def ends_at_its_time(stream):
    """The request ends once, with the output so far."""
    *_, last = stream.all()
    assert last.final and not last.error
    assert last.outputs["finish_reason"] == [b"timeout"]


def test_endless_requests_and_steps_do_not_block_shutdown(tiny, stuck):
    """Check that SIGTERM ends the server with exit code 0, without shared memory left over."""
    with TritonServer(tiny[0], LIMITS, repository=stuck, engine_only=True) as server, raw_stream(server) as stream:
        begun(stream)
        server.terminate()
        ends_at_its_time(stream)
        stream.close()
        assert server.wait(60) == 0


def test_a_relayed_request_fails_once_when_the_stop_timeout_is_over(tiny, stuck):
    options = LIMITS | {"request_timeout": 0}
    with TritonServer(tiny[0], options, repository=stuck) as server, opened(server, "ensemble") as stream:
        stream.send(**ASKED | {"max_tokens": [[200]]})
        stream.next()
        server.terminate()
        with pytest.raises(InferenceServerException, match=r"^UNAVAILABLE: the engine's model was unloaded, or has"):
            stream.all()
        stream.client.stop_stream()
        assert stream.responses.empty()
        assert server.wait(60) == 0


def test_a_model_with_a_stuck_step_can_be_reloaded(tiny, tmp_path):
    repository = faults.inject_into_repository(engine_alone(tmp_path), STUCK)
    (repository / MODEL / "1" / "model.json").write_text(json.dumps({"model": str(tiny[0])} | LIMITS))
    ask = {"text_input": "x", "sampling_parameters": json.dumps(LONG | {"max_tokens": 8})}
    with (
        plain_server(repository, "--model-control-mode=explicit", f"--load-model={MODEL}") as server,
        closing(Models(server, repository)) as models,
    ):
        expected = post(server, ask)
        with raw_stream(server) as stream:
            begun(stream)
            models.start_unloading()
            ends_at_its_time(stream)
            stream.close()
        models.unload()
        models.load()
        assert post(server, ask) == expected
        idle(server)
    assert expected[0] == 200


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
