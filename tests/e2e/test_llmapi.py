"""TensorRT-LLM's LLM API model through a real Triton server, with the calls of its clients."""

import itertools
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from paged_backend.trtllm.tensors import LLMAPI, LLMAPI_INPUTS, LLMAPI_OUTPUTS
from tests.support.triton import idle, metrics, post
from tests.support.trtllm_streams import opened
from tests.support.waiting import WAIT, until

MODEL, STREAMING = "llmapi", "llmapi_streaming"
TYPES = {
    "TYPE_STRING": ("BYTES", np.object_), "TYPE_BOOL": ("BOOL", np.bool_), "TYPE_INT32": ("INT32", np.int32),
    "TYPE_UINT64": ("UINT64", np.uint64), "TYPE_FP32": ("FP32", np.float32),
}  # fmt: skip


def inputs(**values):
    """Return one-dimensional inputs, like TensorRT-LLM's client."""
    made = []
    for name, value in values.items():
        kind, dtype = TYPES[LLMAPI_INPUTS[name].data_type]
        one = np.array([item.encode() if isinstance(item, str) else item for item in value], dtype)
        made.append(grpcclient.InferInput(name, list(one.shape), kind))
        made[-1].set_data_from_numpy(one)
    return made


@pytest.fixture(scope="module")
def client(tiny_server):
    with grpcclient.InferenceServerClient(tiny_server.grpc_url) as made:
        yield made


def ask(client, request_id="", **values):
    """Make a non-streaming call and return all outputs by name."""
    result = client.infer(MODEL, inputs(**{"text_input": ["The sea"]} | values), request_id=request_id)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def begin(client, request_id="", model=MODEL, **values):
    """Stream like TensorRT-LLM's client, including a parameter that no model reads."""
    answers = queue.Queue()
    client.async_infer(
        model, inputs(**values), lambda result, error: answers.put(error or result), request_id=request_id,
        parameters={"Streaming": False, "ignore_eos": True},
    )  # fmt: skip
    return answers


def engine(tiny_server, **values):
    """Return the output of the engine's own model."""
    body = {"text_input": "The sea", "exclude_input_in_output": True, "temperature": 0, "max_tokens": 8} | values
    return json.loads(post(tiny_server, body)[1])["text_output"]


def test_infer_calls_with_all_inputs_and_outputs(tiny_server, client):
    sampled = {
        "sampling_param_temperature": [1.5], "sampling_param_top_k": [20], "sampling_param_top_p": [0.9],
        "sampling_param_frequency_penalty": [0.25], "sampling_param_presence_penalty": [0.5],
        "sampling_param_max_tokens": [8], "sampling_param_seed": [11], "sampling_param_best_of": [1],
        "sampling_param_stop": ["\x00never"], "sampling_param_exclude_input_from_output": [True],
        "sampling_param_return_perf_metrics": [True], "sampling_param_logits_post_processor_name": [""],
        "return_finish_reason": [True], "return_stop_reason": [True], "return_cumulative_logprob": [True],
        "streaming": [False], "stop": [False], "image_url": [""], "lora_id": [0], "lora_name": [""], "lora_path": [""],
        "lora_ckpt_source": ["hf"],
    }  # fmt: skip
    assert {"text_input", *sampled} == LLMAPI_INPUTS.keys()
    alike = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    said = engine(tiny_server, seed=11, **alike)
    first, second = (ask(client, **sampled) for _ in range(2))
    assert first.keys() == LLMAPI_OUTPUTS.keys()
    for one in (first, second):
        assert all(value.shape == (1,) for value in one.values())
        assert one["text_output"][0].decode(errors="replace") == said
        assert (one["finish_reason"][0], one["stop_reason"][0]) == (b"length", b"None")
        assert one["cumulative_logprob"] < 0
        times = [one[f"{what}_time_ns"] for what in ("arrival", "first_scheduled", "first_token", "last_token")]
        assert times == sorted(times)
        missed, reused = one["kv_cache_missed_block"].item(), one["kv_cache_reused_block"].item()
        assert one["kv_cache_hit_rate"].item() == pytest.approx(reused / (reused + missed))
        assert one["kv_cache_alloc_total_blocks"] == one["kv_cache_alloc_new_blocks"] + reused
        assert (one["acceptance_rate"], one["total_draft_tokens"], one["total_accepted_draft_tokens"]) == (0, 0, 0)
    assert second["kv_cache_reused_block"] > 0
    assert second["kv_cache_missed_block"] == 1
    assert ask(client).keys() == {"text_output"}


def test_defaults_and_finish_reasons(tiny_server, client):
    whole = engine(tiny_server, max_tokens=32)
    assert ask(client)["text_output"][0].decode(errors="replace") == "The sea" + whole
    stop = next(char for char in whole[1:] if char.isascii())
    asked = {"sampling_param_stop": [stop, "x" * 9], "sampling_param_exclude_input_from_output": [True]}
    one = ask(client, **asked, return_stop_reason=[True], return_finish_reason=[True])
    assert one["text_output"][0].decode() == whole[: whole.index(stop)]
    assert (one["finish_reason"][0], one["stop_reason"][0].decode()) == (b"stop", stop)
    several = {"sampling_param_best_of": [4], "sampling_param_top_k": [30], "sampling_param_max_tokens": [8]}
    best = ask(client, **several, return_cumulative_logprob=[True])
    assert best["cumulative_logprob"].shape == (1,)


def test_documented_curl_commands(tiny_server):
    status, text = post(tiny_server, {"text_input": "The sea", "sampling_param_max_tokens": 8}, model=MODEL)
    assert (status, json.loads(text)["text_output"]) == (200, "The sea" + engine(tiny_server))
    status, text = post(tiny_server, {"text_input": "The sea", "max_tokens": 8}, model=MODEL)
    assert (status, json.loads(text)["text_output"]) == (200, "The sea" + engine(tiny_server))


def test_stream_responses_have_the_whole_text_so_far(tiny_server):
    said = engine(tiny_server)
    body = {"text_input": "The sea", "streaming": True, "sampling_param_max_tokens": 8, "return_finish_reason": True}
    events = post(tiny_server, body, "generate_stream", model=STREAMING)[1].strip().split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    texts = [part["text_output"] for part in parts]
    assert texts[-1] == said
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    reasons = [part["finish_reason"] for part in parts]
    assert reasons == ["None"] * (len(parts) - 1) + ["stop"]
    with opened(tiny_server, STREAMING) as stream:
        sent = inputs(text_input=["The sea"], streaming=[True], sampling_param_max_tokens=[8])
        stream.client.async_stream_infer(STREAMING, sent, enable_empty_final_response=True)
        assert stream.all()[-1]["text_output"][0].decode() == said


def test_stop_ends_a_request_with_partial_output(server):
    """Uses the repository's model and a slow engine."""
    before = metrics(server)["paged_generation_tokens_total"]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        long = {"text_input": ["The sea"], "sampling_param_max_tokens": [2000], "return_finish_reason": [True]}
        running = begin(client, "1", LLMAPI, **long)
        until(lambda: metrics(server)["paged_generation_tokens_total"] > before, "a token")
        stopped = begin(client, "1", LLMAPI, text_input=[""], stop=[True]).get(timeout=WAIT)
        assert stopped.status() == "StatusCode.CANCELLED", "which its clients take for the answer"
        cut = running.get(timeout=WAIT)
    assert cut.as_numpy("finish_reason").tolist() == [b"cancelled"]
    assert len(cut.as_numpy("text_output")[0]) > len("The sea")
    idle(server)


def test_a_cancelled_infer_call_ends(server):
    before = metrics(server)
    long = inputs(text_input=["The sea"], sampling_param_max_tokens=[2000])
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        answers = queue.Queue()
        call = client.async_infer(
            LLMAPI, long, lambda result, error: answers.put(error), parameters={"ignore_eos": True}
        )  # fmt: skip
        tokens = "paged_generation_tokens_total"
        until(lambda: metrics(server)[tokens] > before[tokens], "a token")
        call.cancel()
        assert answers.get(timeout=WAIT).status() == "StatusCode.CANCELLED"
    ended = "paged_requests_finished_total{cancelled}"
    until(lambda: metrics(server)[ended] == before[ended] + 1, "a cancellation")
    idle(server)


def test_inputs_of_the_upstream_tests(tiny_server, client):
    """A stop before the request exists, or after it has ended, has no effect."""
    short = {"text_input": ["The sea"], "sampling_param_max_tokens": [8]}
    stop = {"text_input": [""], "stop": [True]}
    assert begin(client, "1", **stop).get(timeout=WAIT).status() == "StatusCode.CANCELLED"
    first = begin(client, "1", **short).get(timeout=WAIT).as_numpy("text_output")
    assert begin(client, "1", **stop).get(timeout=WAIT).status() == "StatusCode.CANCELLED"
    assert begin(client, "2", **short).get(timeout=WAIT).as_numpy("text_output") == first
    assert begin(client, "", **stop).get(timeout=WAIT).message().endswith("set it to that of the request to end")
    idle(tiny_server)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sampling_param_max_tokens": [9999]}, "INVALID_ARGUMENT: sampling_param_max_tokens=9999: must be 1..256"),
        ({"streaming": [True]}, "INVALID_ARGUMENT: streaming=true: Streaming is only supported in decoupled mode"),
        ({"image_url": ["http://x"]}, 'INVALID_ARGUMENT: image_url="...": not supported; leave it out'),
        ({"lora_name": ["pirate"]}, "LoRA feature is not enabled."),
        ({"text_input": ["One", "Two"]}, "INVALID_ARGUMENT: text_input: has 2 elements per row; must have 1"),
    ],
)
def test_bad_input_is_named(client, values, message):
    with pytest.raises(InferenceServerException) as caught:
        ask(client, **values)
    assert message in caught.value.message()
