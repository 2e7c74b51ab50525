"""Compatibility with clients of Triton's vLLM backend and with Triton's OpenAI frontend, for every tensor."""

import asyncio
import json
from contextlib import contextmanager
from itertools import chain
from queue import Queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aio

from tests.support.triton import MODEL, idle, post, tensors
from tests.support.waiting import WAIT

PROMPT = "The most dangerous animal is"
# As the backend's own clients send them: strings, once as a tensor and once as request parameters.
SAMPLING = {"temperature": "0", "top_p": "1", "ignore_eos": "true"}
ASKED = {
    "return_finish_reason": "finish_reason",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_logprobs": "logprobs",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
TYPES = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


class Client:
    """A gRPC stream; responses are those of tritonclient."""

    def __init__(self, client):
        self._client = client
        self.responses = Queue()

    def send(self, parameters=None, **inputs):
        self._client.async_stream_infer(
            MODEL, tensors(inputs), request_id="0", parameters=parameters, enable_empty_final_response=True
        )

    def one(self):
        result, error = self.responses.get(timeout=WAIT)
        assert error is None, error
        return result

    def all(self):
        found = [self.one()]
        while not final(found[-1]):
            found.append(self.one())
        return found

    def error(self):
        result, error = self.responses.get(timeout=WAIT)
        assert result is None
        return error

    def cancel(self):
        self._client.stop_stream(cancel_requests=True)


def final(result):
    return result.get_response().parameters["triton_final_response"].bool_param


def texts(result):
    return [text.decode() for text in result.as_numpy("text_output")]


@contextmanager
def connected(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as raw:
        client = Client(raw)
        raw.start_stream(lambda result, error: client.responses.put((result, error)))
        yield client


@pytest.fixture
def client(tiny_server):
    with connected(tiny_server) as made:
        yield made
    idle(tiny_server)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_requested_outputs_have_one_element_per_sample(client, stream, n, asked):
    sampling = SAMPLING | {"n": str(n), "temperature": "1", "logprobs": "1", "seed": "5"}
    client.send(
        text_input=PROMPT,
        stream=stream,
        sampling_parameters=sampling,
        **({} if asked is None else dict.fromkeys(ASKED, asked)),
    )
    responses = client.all()
    expected = {"text_output", *(ASKED.values() if asked else ())}
    for result in responses:
        outputs = {output.name: output for output in result.get_response().outputs}
        assert outputs.keys() == expected
        for name, output in outputs.items():
            assert output.datatype == TYPES[name]
            assert list(output.shape) == [1 if name == "num_input_tokens" else n]
    assert stream or len(responses) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_deltas_add_up_to_the_whole(client, n):
    asked = dict.fromkeys(ASKED, True)
    sampling = SAMPLING | {"temperature": 1, "seed": 3, "n": n, "logprobs": 0, "max_tokens": 12}
    client.send(text_input=PROMPT, stream=True, sampling_parameters=sampling, **asked)
    parts = client.all()
    client.send(text_input=PROMPT, stream=False, exclude_input_in_output=True, sampling_parameters=sampling, **asked)
    (whole,) = client.all()
    for sample in range(n):
        assert "".join(texts(part)[sample] for part in parts) == texts(whole)[sample]
        counts = [int(part.as_numpy("num_output_tokens")[sample]) for part in parts]
        assert sum(counts) == whole.as_numpy("num_output_tokens")[sample] == 12
        streamed = [json.loads(part.as_numpy("logprobs")[sample]) for part in parts]
        assert [len(one) for one in streamed] == counts
        pairs = zip(chain(*streamed), json.loads(whole.as_numpy("logprobs")[sample]), strict=True)
        assert all(part.keys() == token.keys() for part, token in pairs)
        reasons = [part.as_numpy("finish_reason")[sample].decode() for part in parts]
        ended = reasons.index("length")
        assert reasons == ["None"] * ended + ["length"] * (len(parts) - ended)
        assert all(not texts(part)[sample] for part in parts[ended + 1 :])
        sums = [float(part.as_numpy("cumulative_logprob")[sample]) for part in parts]
        assert sums == sorted(sums, reverse=True)
        assert sums[-1] == pytest.approx(float(whole.as_numpy("cumulative_logprob")[sample]), abs=1e-4)
    assert [part.as_numpy("num_input_tokens").tolist() for part in parts] == [[len(PROMPT)]] * len(parts)
    assert [final(part) for part in parts] == [False] * (len(parts) - 1) + [True]


def test_logprobs_are_null_unless_requested_in_sampling(client):
    client.send(text_input=PROMPT, sampling_parameters=SAMPLING | {"n": 2, "temperature": 1}, return_logprobs=True)
    (result,) = client.all()
    assert result.as_numpy("logprobs").tolist() == [b"null", b"null"]


def test_max_tokens_defaults_to_sixteen(client):
    client.send(text_input=PROMPT, sampling_parameters=SAMPLING, return_num_output_tokens=True)
    (result,) = client.all()
    assert result.as_numpy("num_output_tokens").tolist() == [16]


def test_parameters_as_a_tensor_or_request_parameters(client):
    answers = []
    wanted = SAMPLING | {"max_tokens": "7"}
    for parameters, tensor in ((None, wanted), (wanted, None), (wanted | {"max_tokens": 3}, wanted), (wanted, wanted)):
        inputs = {} if tensor is None else {"sampling_parameters": tensor}
        client.send(parameters, text_input=PROMPT, return_num_output_tokens=True, **inputs)
        (result,) = client.all()
        answers.append((texts(result), result.as_numpy("num_output_tokens").tolist()))
    assert answers == [answers[0]] * 4
    assert answers[0][1] == [7]


@pytest.mark.parametrize(("exclude", "prompt"), [(None, PROMPT), (False, PROMPT), (True, "")])
def test_the_prompt_is_prepended_unless_excluded(client, exclude, prompt):
    inputs = {} if exclude is None else {"exclude_input_in_output": exclude}
    client.send(text_input=PROMPT, sampling_parameters=SAMPLING | {"n": 3, "temperature": 1, "seed": 1}, **inputs)
    (result,) = client.all()
    assert all(text.startswith(prompt) for text in texts(result))
    assert any(PROMPT in text for text in texts(result)) is bool(prompt)


@pytest.mark.parametrize("exclude", [None, True])
def test_a_stream_never_includes_the_prompt(client, exclude):
    inputs = {} if exclude is None else {"exclude_input_in_output": exclude}
    client.send(text_input=PROMPT, stream=True, sampling_parameters=SAMPLING, **inputs)
    assert not "".join(text for result in client.all() for text in texts(result)).startswith(PROMPT)


def test_streaming_with_the_prompt_is_rejected_with_the_upstream_message(client):
    client.send(text_input=PROMPT, stream=True, exclude_input_in_output=False, sampling_parameters=SAMPLING)
    letter = "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    assert client.error().message() == letter


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"text_input": PROMPT, "sampling_parameters": {"temperature": "hot"}}, 'temperature="hot": must be a number'),
        ({"text_input": PROMPT, "sampling_parameters": {"frobnicate": 1}}, "frobnicate=1: unknown sampling parameter"),
        ({"text_input": PROMPT, "sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"text_input": PROMPT, "image": "AA=="}, "image: images are not supported; leave it out"),
        ({"stream": True}, "text_input"),
    ],
)
def test_errors_have_the_upstream_prefix(client, inputs, reason):
    client.send(**inputs)
    assert client.error().message().startswith(f"Error generating stream: INVALID_ARGUMENT: {reason}")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text_input": "x", "guided_json": "{}"}, 'guided_json="{}": unknown parameter; use json_schema instead'),
        ({"text_input": "x", "use_beam_search": True}, "use_beam_search=true: not supported; use beam_width instead"),
        (
            {"messages": '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]'},
            'messages[0].content[0]: images are not supported (type "image_url"); send text only',
        ),
    ],
)
def test_errors_say_what_to_use_instead(tiny_server, body, reason):
    status, text = post(tiny_server, body)
    assert (status, json.loads(text)["error"].endswith(f"INVALID_ARGUMENT: {reason}")) == (400, True), text


def test_numbers_may_be_strings(tiny_server):
    body = {"text_input": "x", "max_tokens": "3", "ignore_eos": "true", "return_num_output_tokens": True}
    status, text = post(tiny_server, body)
    assert (status, json.loads(text)["num_output_tokens"]) == (200, 3)


def test_two_prompts_in_one_asyncio_stream(tiny_server):
    async def requests():
        for prompt in (PROMPT, "The future of AI is"):
            inputs = {"text_input": prompt, "stream": True, "sampling_parameters": SAMPLING}
            made = [aio.InferRequestedOutput("text_output")]
            yield {"model_name": MODEL, "inputs": tensors(inputs), "outputs": made, "request_id": prompt}

    async def answers():
        said = {}
        async with aio.InferenceServerClient(tiny_server.grpc_url) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                identity = result.get_response().id
                said[identity] = said.get(identity, b"") + result.as_numpy("text_output")[0]
        return said

    said = asyncio.run(asyncio.wait_for(answers(), WAIT))
    assert said.keys() == {PROMPT, "The future of AI is"}
    assert all(said.values())


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_the_request_body_of_the_upstream_readme(tiny_server, endpoint):
    """Tensors are next to the sampling parameters, which are a nested object."""
    parameters = {"stream": False, "temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_finish_reason": True}
    status, text = post(tiny_server, {"text_input": PROMPT, "parameters": parameters}, endpoint)
    assert status == 200
    answer = json.loads(text.removeprefix("data: "))
    assert answer["text_output"].startswith(PROMPT)
    assert answer["finish_reason"] == "length"


def test_cancelling_a_stream_cancels_its_requests_once(tiny_server):
    with connected(tiny_server) as client:
        for _ in range(30):
            client.send(text_input=PROMPT, sampling_parameters={"temperature": "0.75", "top_p": "0.9"})
        client.cancel()
        while True:  # responses that were sent before it
            _, error = client.responses.get(timeout=WAIT)
            if error is not None:
                break
        assert error.status() == "StatusCode.CANCELLED"
        assert client.responses.empty()
    idle(tiny_server)


# Requests that the vLLM converter of Triton's OpenAI frontend makes of a chat request and a completion request.
CHAT = {"temperature": 0.7, "top_p": 1.0, "n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": 9}
FRONTEND = [
    (CHAT | {"ignore_eos": False, "seed": 2, "stop": ["zzzz"]}, False),  # the tokens of this seed have no EOS
    (CHAT | {"temperature": 1.0, "ignore_eos": True, "seed": 4, "min_tokens": 2, "stop": "zzzz"}, False),
    (CHAT | {"ignore_eos": True, "logprobs": 2}, True),
]


def test_a_named_tool_of_the_openai_frontend(demo_server):
    """The schema is JSON inside JSON, with all fields of vLLM, most of them null."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
    nulls = dict.fromkeys(("regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"))
    flags = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend_was_auto")
    asked = {"json": json.dumps(schema), **nulls, **dict.fromkeys(flags, False), "_backend": None}
    sampling = CHAT | {
        "max_tokens": 40,
        "ignore_eos": False,
        "temperature": 0.0,
        "structured_outputs": json.dumps(asked),
    }
    with connected(demo_server) as client:
        client.send(text_input=PROMPT, stream=True, exclude_input_in_output=True, sampling_parameters=sampling)
        said = "".join(text for one in client.all() for text in texts(one))
    assert json.loads(said).keys() == {"city"}
    idle(demo_server)


@pytest.mark.parametrize(("sampling", "logprobs"), FRONTEND)
@pytest.mark.parametrize("stream", [False, True])
def test_tensors_of_the_openai_frontend(client, stream, sampling, logprobs):
    """The frontend expects one string per tensor, one or two responses without streaming, of which the last is final,
    UINT32 counts per chunk, and logprobs for as many tokens.
    """
    client.send(
        text_input=PROMPT,
        stream=stream,
        exclude_input_in_output=True,
        sampling_parameters=sampling,
        return_logprobs=logprobs,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    responses = client.all()
    assert stream or len(responses) <= 2
    assert final(responses[-1]) and not any(final(one) for one in responses[:-1])
    for one in responses:
        assert one.as_numpy("text_output").size == 1
        for name in ("num_input_tokens", "num_output_tokens"):
            counts = one.as_numpy(name)
            assert (counts.dtype, counts.size) == (np.uint32, 1)
        assert one.as_numpy("num_input_tokens")[0] == len(PROMPT)
    assert sum(one.as_numpy("num_output_tokens")[0] for one in responses) == 9
    if logprobs:
        tokens = [token for one in responses for token in json.loads(one.as_numpy("logprobs")[0])]
        assert len(tokens) == 9
        for token in tokens:
            ranked = sorted(token.values(), key=lambda entry: entry["rank"])
            assert [entry.keys() for entry in ranked] == [{"logprob", "rank", "decoded_token"}] * len(ranked)
