"""tensorrtllm_backend's models through a real Triton server, with the tensors and calls of its clients."""

import json
import re

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from transformers import GenerationConfig
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from paged_backend.trtllm.tensors import INPUTS, OUTPUTS
from tests.support.triton import idle, metrics, post, raw_stream
from tests.support.trtllm_streams import TEXT_MODELS, WIRE, inputs, opened
from tests.support.waiting import until

WIRE["TYPE_STRING"] = "BYTES"


def answers(server, model="tensorrt_llm_bls", **values):
    with opened(server, model) as stream:
        stream.send(**values)
        return stream.all()


def text_of(parts):
    return b"".join(part["text_output"][0] for part in parts)


def expected(server, prompt, **sampling):
    """Return the output of the engine's own model."""
    with raw_stream(server) as stream:
        stream.send(text_input=prompt, exclude_input_in_output=True, sampling_parameters=sampling)
        (response,) = stream.all()
        return [text.decode(errors="replace") for text in response.outputs["text_output"]]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_curl_commands_of_the_upstream_readme(tiny_server, model):
    body = {"text_input": "What is machine learning?", "max_tokens": 8, "bad_words": "", "stop_words": ""}
    status, text = post(tiny_server, body, model=model)
    (said,) = expected(tiny_server, body["text_input"], max_tokens=8, temperature=0)
    assert (status, json.loads(text)["text_output"]) == (200, body["text_input"] + said)
    status, text = post(tiny_server, body | {"exclude_input_in_output": True}, model=model)
    assert json.loads(text)["text_output"] == said
    events = post(tiny_server, body | {"stream": True}, "generate_stream", model=model)[1]
    parts = [json.loads(event.removeprefix("data: ")) for event in events.strip().split("\n\n")]
    assert "".join(part["text_output"] for part in parts) == said


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_non_streaming_responses_over_grpc_and_http(tiny_server, model):
    """The models are decoupled, so the client streams; the last response is marked as final."""
    parts = answers(tiny_server, model, text_input=[["The sea"]], max_tokens=[[6]], stream=[[True]])
    (said,) = expected(tiny_server, "The sea", max_tokens=6, temperature=0)
    assert text_of(parts).decode() == said
    assert all(part.keys() == {"text_output"} and part["text_output"].shape == (1,) for part in parts)
    with httpclient.InferenceServerClient(tiny_server.http_url) as client:
        assert client.is_model_ready(model)
        assert client.get_model_config(model)["max_batch_size"] == 64


def test_rows_are_identified_by_batch_index(tiny_server):
    prompts = ["The sea", "A mountain"]
    parts = answers(
        tiny_server,
        text_input=[[one] for one in prompts],
        max_tokens=[[5], [7]],
        stream=[[True], [True]],
        return_num_input_tokens=[[True], [True]],
        return_num_output_tokens=[[True], [True]],
    )
    for index, (prompt, tokens) in enumerate(zip(prompts, (5, 7), strict=True)):
        ours = [part for part in parts if part["batch_index"].tolist() == [[index]]]
        assert text_of(ours).decode() == expected(tiny_server, prompt, max_tokens=tokens, temperature=0)[0]
        assert sum(part["num_output_tokens"].item() for part in ours) == tokens
        assert ours[0]["num_input_tokens"].shape == (1, 1)
    idle(tiny_server)


def test_each_row_of_a_non_streaming_batch_has_one_response(tiny_server):
    parts = answers(tiny_server, text_input=[["One"], ["Two"], ["Three"]], max_tokens=[[3]] * 3)
    assert sorted(part["batch_index"].item() for part in parts) == [0, 1, 2]
    assert all(part["text_output"][0].startswith((b"One", b"Two", b"Three")) for part in parts)


@pytest.mark.parametrize(("seed", "least"), [("seed", "min_tokens"), ("random_seed", "min_length")])
def test_sampling_with_old_and_new_tensor_names(tiny_server, seed, least):
    values = {seed: [[11]], least: [[2]], "top_k": [[20]], "top_p": [[0.9]], "temperature": [[1.5]]}
    values |= {"repetition_penalty": [[1.1]], "presence_penalty": [[0.5]], "frequency_penalty": [[0.25]]}
    parts = answers(tiny_server, text_input=[["The sea"]], max_tokens=[[8]], exclude_input_in_output=[[True]], **values)
    (said,) = expected(
        tiny_server, "The sea", max_tokens=8, seed=11, min_tokens=2, top_k=20, top_p=0.9, temperature=1.5,
        repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.25,
    )  # fmt: skip
    assert text_of(parts).decode(errors="replace") == said


def test_samples_are_identified_by_sequence_index(tiny_server):
    sampling = {"n": 3, "seed": 5, "top_k": 30, "max_tokens": 6}
    parts = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[6]], num_return_sequences=[[3]], seed=[[5]], top_k=[[30]],
        stream=[[True]],
    )  # fmt: skip
    texts = [text_of([p for p in parts if p["sequence_index"].tolist() == [[i]]]) for i in range(3)]
    assert [one.decode(errors="replace") for one in texts] == expected(tiny_server, "The sea", **sampling)


def test_several_samples_over_http_need_generate_stream(tiny_server):
    """Each sample is a response of its own, and Triton's `generate` accepts only one."""
    body = {"text_input": "The sea", "max_tokens": 4, "num_return_sequences": 2, "top_k": 30, "seed": 5}
    _, text = post(tiny_server, body, model="ensemble")  # the HTTP status is 200 anyway
    assert "generate expects model to produce exactly 1 response" in json.loads(text)["error"]
    events = post(tiny_server, body, "generate_stream", model="ensemble")[1].strip().split("\n\n")
    assert sorted(json.loads(event.removeprefix("data: "))["sequence_index"] for event in events) == [0, 1]


def test_beams_are_returned_together(tiny_server):
    (part,) = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[5]], beam_width=[[3]], exclude_input_in_output=[[True]],
        length_penalty=[[0.5]],
    )  # fmt: skip
    sampling = {"beam_width": 3, "n": 3, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 5}
    assert [one.decode(errors="replace") for one in part["text_output"]] == expected(tiny_server, "The sea", **sampling)


def test_a_stop_word_is_part_of_the_text(tiny_server):
    (whole,) = expected(tiny_server, "The sea", max_tokens=12, temperature=0)
    word = whole[3:5]
    parts = answers(tiny_server, text_input=[["The sea"]], max_tokens=[[12]], stop_words=[[word, ""]], stream=[[True]])
    assert text_of(parts).decode() == whole[: whole.index(word) + len(word)]


def test_embedding_bias_and_bad_words(tiny_server):
    asked = {"text_input": [["The sea"]], "max_tokens": [[6]], "exclude_input_in_output": [[True]]}
    (part,) = answers(tiny_server, **asked, embedding_bias_words=[["k", ""]], embedding_bias_weights=[[100.0, 1.0]])
    assert part["text_output"].tolist() == [b"kkkkkk"]
    (part,) = answers(
        tiny_server, **asked, embedding_bias_words=[["k", "m"]], embedding_bias_weights=[[100.0, 50.0]],
        bad_words=[["k"]],
    )  # fmt: skip
    assert part["text_output"].tolist() == [b"mmmmmm"]


def test_end_id_ends_the_output(tiny_server):
    parts = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[9]], end_id=[[-1]], pad_id=[[0]], stream=[[True]],
        return_num_output_tokens=[[True]],
    )  # fmt: skip
    assert sum(part["num_output_tokens"].item() for part in parts) == 9


def test_log_probs(tiny_server):
    parts = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[6]], return_log_probs=[[True]], end_id=[[-1]],
        stream=[[True]],
    )  # fmt: skip
    assert all(part["output_log_probs"].shape[:2] == (1, 1) and part["cum_log_probs"].shape == (1, 1) for part in parts)
    every = np.concatenate([part["output_log_probs"][0, 0] for part in parts])
    assert len(every) == 6
    assert parts[-1]["cum_log_probs"].item() == pytest.approx(every.sum(), abs=1e-4)


def test_log_probs_of_beams(tiny_server):
    (part,) = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[5]], beam_width=[[2]], return_log_probs=[[True]],
        end_id=[[-1]],
    )  # fmt: skip
    assert part["output_log_probs"].shape == (1, 2, 5)
    assert part["cum_log_probs"][0] == pytest.approx(part["output_log_probs"][0].sum(-1), abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "guide", "form"),
    [
        ("regex", "[ab]{4}", r"[ab]{4}"),
        ("json_schema", '{"type": "boolean"}', r"true|false"),
        ("ebnf_grammar", 'root ::= "yes" | "no"', r"yes|no"),
    ],
)
def test_guided_decoding_over_the_server(tiny_server, kind, guide, form):
    parts = answers(
        tiny_server, text_input=[["The sea"]], max_tokens=[[12]], guided_decoding_guide_type=[[kind]],
        guided_decoding_guide=[[guide]], stream=[[True]],
    )  # fmt: skip
    assert re.fullmatch(form, text_of(parts).decode())


def test_perf_metrics(tiny_server):
    asked = {"text_input": [["What a cache has it need not compute"]], "max_tokens": [[4]]}
    first, second = (answers(tiny_server, **asked, return_perf_metrics=[[True]])[-1] for _ in range(2))
    assert all(value.shape == (1, 1) for name, value in first.items() if name != "text_output")
    assert second["kv_cache_reused_blocks"] > 0
    assert second["kv_cache_alloc_new_blocks"] < first["kv_cache_alloc_new_blocks"]
    for one in (first, second):
        total = one["kv_cache_alloc_new_blocks"] + one["kv_cache_reused_blocks"]
        assert one["kv_cache_alloc_total_blocks"] == total
        times = [one[f"{what}_time_ns"] for what in ("arrival", "first_scheduled", "first_token", "last_token")]
        assert times == sorted(times)
        assert (one["acceptance_rate"], one["total_draft_tokens"], one["total_accepted_draft_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": [[5000]]}, "INVALID_ARGUMENT: max_tokens=5000: must be 1..256"),
        ({"top_p": [[1.5]]}, "INVALID_ARGUMENT: top_p=1.5: must be above 0 and at most 1"),
        ({"min_length": [[9]]}, "INVALID_ARGUMENT: min_length=9: must be 0..max_tokens=4"),
        ({"return_context_logits": [[True]]}, "INVALID_ARGUMENT: return_context_logits=true: not supported"),
        ({"stop_words": [[b"\xff"]]}, "INVALID_ARGUMENT: stop_words: byte 0 is not valid UTF-8; send UTF-8 text"),
        ({"lora_task_id": [[7]]}, "LoRA feature is not enabled."),
        ({"text_input": [[""]]}, "INVALID_ARGUMENT: text_input: the prompt is empty; give at least one character"),
    ],
)
def test_bad_input_is_rejected_by_name(tiny_server, values, message):
    with pytest.raises(InferenceServerException) as caught:
        answers(tiny_server, **{"text_input": [["The sea"]], "max_tokens": [[4]]} | values)
    assert caught.value.message().startswith(message)
    idle(tiny_server)


@pytest.mark.parametrize("values", [{"stream": True}, {"num_return_sequences": 2}], ids=str)
def test_a_model_that_is_not_decoupled_answers_all_requests(tiny_server, values):
    """A second response would raise in the server, and the client would wait for ever."""
    body = {"text_input": "The sea", "max_tokens": 4}
    status, text = post(tiny_server, body | values, model="ensemble_single")
    assert status == 400 and "only supported in decoupled mode" in text
    status, text = post(tiny_server, body, model="ensemble_single")
    assert status == 200 and json.loads(text)["text_output"].startswith("The sea")


def test_the_parameter_of_the_clients_of_tensorrt_llm_is_ignored(tiny_server):
    status, text = post(tiny_server, {"text_input": "The sea", "max_tokens": 4, "Streaming": False}, model="ensemble")
    assert status == 200, text


def test_one_bad_row_fails_the_request_once(tiny_server):
    with opened(tiny_server) as stream:
        stream.send(text_input=[["One"], ["Two"]], max_tokens=[[40], [5000]], end_id=[[-1], [-1]])
        with pytest.raises(InferenceServerException, match="max_tokens=5000"):
            stream.all()
        stream.send(text_input=[["One"]], max_tokens=[[2]])
        assert len(stream.all()) == 1, "nothing of the request before"
    idle(tiny_server)


@pytest.mark.parametrize("name", [7, "mine"])
def test_sessions_through_the_relay(server, name):
    counts = []
    with opened(server) as stream:
        for turn, prompt in enumerate(("Count: one, two,", " and")):
            stream.client.async_stream_infer(
                stream.model,
                inputs(text_input=[[prompt]], max_tokens=[[4]], return_num_input_tokens=[[True]]),
                sequence_id=name,
                sequence_start=turn == 0,
                sequence_end=turn == 1,
                enable_empty_final_response=True,
            )
            (part,) = stream.all()
            counts.append(part["num_input_tokens"].item())
    assert counts[1] > counts[0] + 3, "the second turn goes on from the first"
    idle(server)


def test_timeouts_through_the_relay(server):
    with opened(server) as stream:
        asked = inputs(text_input=[["The sea"]], max_tokens=[[2000]], end_id=[[-1]], return_num_output_tokens=[[True]])
        stream.client.async_stream_infer(stream.model, asked, timeout=1_000_000, enable_empty_final_response=True)
        (part,) = stream.all()
    assert part["num_output_tokens"] < 2000
    idle(server)


def test_other_request_parameters_reach_the_engine(tiny_server):
    body = {"text_input": "The sea", "max_tokens": 3, "parameters": {"priority": 3, "min_p": 0.1}}
    assert post(tiny_server, body, model="ensemble")[0] == 200
    status, text = post(tiny_server, body | {"parameters": {"prioritty": 3}}, model="ensemble")
    assert (status, "did you mean priority?" in text) == (400, True)
    status, text = post(tiny_server, body | {"parameters": {"cache_salt": "mine"}}, model="ensemble")
    assert (status, "needs the option cache_salt_from=parameter" in text) == (400, True)


def test_a_disconnected_client_ends_the_engine_requests(server):
    before = metrics(server)["paged_requests_finished_total{cancelled}"]
    long = {"max_tokens": [[2000]] * 2, "end_id": [[-1]] * 2}
    with opened(server) as stream:
        stream.send(text_input=[["The sea"], ["The sky"]], stream=[[True], [False]], **long)
        stream.next()
        stream.cancel()
        until(lambda: metrics(server)["paged_requests_finished_total{cancelled}"] == before + 2, "two cancelled")
    idle(server)


def test_many_concurrent_streams(tiny_server):
    """More streams than the server has sending threads; most wait in the engine's queue."""
    with opened(tiny_server) as stream:
        for index in range(80):
            stream.send(str(index), text_input=[["The sea"]], max_tokens=[[4]], stream=[[True]], end_id=[[-1]])
        ended = 0
        while ended < 80:
            ended += stream.next()[1]
    idle(tiny_server)


# --- token ids -------------------------------------------------------------------------------------------------------

IDS = [40, 50, 60, 70, 80]


def core(server, **values):
    """Return inputs like those that tensorrtllm_backend's client sends to the core model."""
    asked = {
        "input_ids": [IDS], "input_lengths": [[len(IDS)]], "request_output_len": [[6]], "beam_width": [[1]],
        "temperature": [[1.0]], "streaming": [[True]], "end_id": [[-1]], "pad_id": [[0]], "runtime_top_k": [[1]],
        "runtime_top_p": [[0.0]],
    }  # fmt: skip
    return answers(server, "tensorrt_llm", **asked | values)


def greedy(tiny, prompt, tokens):
    ids = torch.tensor([prompt])
    tiny[1].generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    found = tiny[1].generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return found[0, len(prompt) :].tolist()


def test_tokens_match_the_engine(tiny_server, tiny):
    expected = greedy(tiny, IDS, 6)
    parts = core(tiny_server)
    assert [token for part in parts for token in part["output_ids"][0, 0].tolist()] == expected
    assert all(part["sequence_length"].tolist() == [[part["output_ids"].shape[2]]] for part in parts)
    (part,) = core(tiny_server, streaming=[[False]])
    assert part["output_ids"].tolist() == [[IDS + expected]], "the prompt comes back"
    (part,) = core(tiny_server, streaming=[[False]], exclude_input_in_output=[[True]])
    assert part["output_ids"].tolist() == [[expected]]


def test_rows_of_token_ids_are_padded(tiny_server, tiny):
    rows = {"input_ids": [IDS, [33, 34, 0, 0, 0]], "input_lengths": [[5], [2]]}
    both = {name: [[value], [value]] for name, value in {"request_output_len": 4, "end_id": -1}.items()}
    parts = answers(tiny_server, "tensorrt_llm", **rows, **both, exclude_input_in_output=[[True], [True]])
    found = {part["batch_index"].item(): part["output_ids"][0, 0].tolist() for part in parts}
    assert found == {0: greedy(tiny, IDS, 4), 1: greedy(tiny, [33, 34], 4)}


def test_output_ids_include_stop_words_but_not_end_id(tiny_server, tiny):
    expected = greedy(tiny, IDS, 6)
    last = next(index for index in range(1, 6) if expected[index] not in expected[:index])
    asked = {"streaming": [[False]], "exclude_input_in_output": [[True]], "return_num_output_tokens": [[True]]}
    (part,) = core(tiny_server, end_id=[[expected[last]]], **asked)
    assert part["output_ids"].tolist() == [[expected[:last]]]
    assert part["num_output_tokens"].tolist() == [[last]]
    (part,) = core(tiny_server, stop_words_list=[[[expected[last]], [1]]], **asked)
    assert part["output_ids"].tolist() == [[expected[: last + 1]]]


def test_stop_and_bad_words_of_several_tokens(tiny_server, tiny):
    expected = greedy(tiny, IDS, 6)
    asked = {"exclude_input_in_output": [[True]], "return_num_output_tokens": [[True]]}
    for streaming in (False, True):
        parts = core(
            tiny_server, stop_words_list=[[[5, *expected[2:4]], [1, 3, -1]]], streaming=[[streaming]], **asked
        )  # fmt: skip
        assert [token for part in parts for token in part["output_ids"][0, 0].tolist()] == expected[:4]
        assert sum(part["num_output_tokens"].item() for part in parts) == 4
    bias = np.zeros((1, 320), np.float32)
    bias[0, expected[0]] = 100  # an opposite bias would cancel a ban that was implemented as a bias
    bad = [[[expected[0], *expected[2:4]], [1, 3, -1]]]
    (part,) = core(tiny_server, bad_words_list=bad, embedding_bias=bias, streaming=[[False]], **asked)
    found = part["output_ids"][0, 0].tolist()
    assert expected[0] not in found
    assert expected[2:4] not in [found[start : start + 2] for start in range(5)]
    with pytest.raises(InferenceServerException, match=r"^INVALID_ARGUMENT: bad_words_list=320: must be 0..319"):
        core(tiny_server, bad_words_list=[[[1, 320], [2, -1]]])


def test_embedding_bias_of_tokens(tiny_server):
    bias = np.zeros((1, 320), np.float32)
    bias[0, 77] = 100
    (part,) = core(tiny_server, embedding_bias=bias, streaming=[[False]], exclude_input_in_output=[[True]])
    assert part["output_ids"].tolist() == [[[77] * 6]]


def test_beams_of_token_ids(tiny_server):
    (part,) = core(
        tiny_server, streaming=[[False]], beam_width=[[3]], len_penalty=[[1.0]], early_stopping=[[False]],
        exclude_input_in_output=[[True]],
    )  # fmt: skip
    assert part["output_ids"].shape == (1, 3, 6)
    assert part["sequence_length"].tolist() == [[6, 6, 6]]


def test_extra_inputs_of_the_upstream_tests(tiny_server):
    """A decoder pad token, and settings with their default values."""
    parts = core(
        tiny_server, decoder_input_ids=[[0]], decoder_input_lengths=[[1]], runtime_top_p_decay=[[1.0]],
        num_return_sequences=[[1]], return_log_probs=[[True]], return_perf_metrics=[[True]],
    )  # fmt: skip
    assert sum(part["output_log_probs"].shape[2] for part in parts) == 6
    assert parts[-1]["kv_cache_alloc_total_blocks"] > 0


def test_bad_token_ids_are_rejected_by_name(tiny_server):
    with pytest.raises(InferenceServerException, match=r"^INVALID_ARGUMENT: request_output_len=999: must be"):
        core(tiny_server, request_output_len=[[999]])
    with pytest.raises(InferenceServerException, match=r"^INVALID_ARGUMENT: input_ids"):
        core(tiny_server, input_ids=[[1, 2, 3, 4, 9999]])
    idle(tiny_server)


def test_stop_ends_the_request_with_that_id(server):
    """The stop is sent on the same stream, as tensorrtllm_backend's client does. Both requests end without an error,
    and the stopped one keeps its tokens.
    """
    before = metrics(server)["paged_requests_finished_total{cancelled}"]
    tokens = metrics(server)["paged_generation_tokens_total"]
    stop = {"input_ids": [[0]], "input_lengths": [[0]], "request_output_len": [[0]], "stop": [[True]]}
    long = {"input_ids": [IDS], "input_lengths": [[5]], "request_output_len": [[2000]], "end_id": [[-1]]}
    with opened(server, "tensorrt_llm") as stream:
        stream.send("17", **long, streaming=[[False]])
        until(lambda: metrics(server)["paged_generation_tokens_total"] > tokens + 3, "some tokens")
        stream.send("17", **stop)
        (stopped,), (cut,) = stream.all(), stream.all()
        assert stopped == {}
        ids = cut["output_ids"][0, 0].tolist()
        assert ids[:5] == IDS
        assert 5 + 3 < len(ids) < 2000
        assert cut["sequence_length"].tolist() == [[len(ids)]]
        stream.send("18", **long, streaming=[[True]])
        begun, _ = stream.next()
        stream.send("18", **stop)
        ids, ended = begun["output_ids"][0, 0].tolist(), 0
        while ended < 2:
            part, last = stream.next()
            ended += last
            ids += part["output_ids"][0, 0].tolist() if part else []
        assert 0 < len(ids) < 2000
        stream.send("", **stop)
        with pytest.raises(InferenceServerException, match="stop: has no request id"):
            stream.all()
    assert metrics(server)["paged_requests_finished_total{cancelled}"] == before + 2
    idle(server)


# --- every tensor -----------------------------------------------------------------------------------------------------


def tensor(model, name, value):
    """Return a tensor of one row. value: of all elements; None: an empty tensor."""
    kind, dims, *_ = INPUTS[model][name]
    size = 0 if value is None else 1
    row = np.full([1, *(size if dim == -1 else dim for dim in dims)], value, triton_to_np_dtype(WIRE[kind]))
    made = grpcclient.InferInput(name, list(row.shape), WIRE[kind])
    made.set_data_from_numpy(row)
    return made


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_every_upstream_tensor_is_declared_and_accepted(tiny_server, model):
    """Unsupported tensors are rejected by name if their value asks for something, and accepted otherwise."""
    needed = {"text_input": b"The sea", "max_tokens": 2, "input_ids": 40, "input_lengths": 1, "request_output_len": 2}
    needed = {name: value for name, value in needed.items() if name in INPUTS[model]}
    neutral = {"runtime_top_p_decay": 1, "retention_decode_duration_ms": -1, "decoder_text_input": b""}
    refused = {name: spec for name, spec in INPUTS[model].items() if spec.unsupported}
    with opened(tiny_server, model) as stream:
        metadata = stream.client.get_model_metadata(model)
        assert {one.name for one in metadata.inputs} == INPUTS[model].keys()
        assert {one.name for one in metadata.outputs} == OUTPUTS[model].keys()

        def send(**values):
            made = [tensor(model, name, value) for name, value in (needed | values).items()]
            stream.client.async_stream_infer(model, made, enable_empty_final_response=True)
            return stream.all()

        harmless = {
            name: neutral.get(name, None if -1 in spec.dims else b"" if spec.data_type == "TYPE_STRING" else 0)
            for name, spec in refused.items()
            if name not in ("retention_decode_priority",) and not name.startswith("lookahead")
        }
        (answer,) = send(**harmless)
        assert answer.keys() <= OUTPUTS[model].keys()
        for name, spec in refused.items():
            if name in ("runtime_top_p_min", "runtime_top_p_reset_ids", "decoder_input_lengths", "decoder_input_ids"):
                continue  # which have no effect alone
            asking = b"something" if spec.data_type == "TYPE_STRING" else 1 + (spec.data_type != "TYPE_BOOL")
            with pytest.raises(InferenceServerException, match=rf"^INVALID_ARGUMENT: {name}=.*not supported; leave"):
                send(**{name: asking})
    idle(tiny_server)
