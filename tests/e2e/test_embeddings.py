"""Embeddings through a real Triton server: requests of vLLM backend clients, and the client library."""

import asyncio
import json

import openai
import pytest
import torch
import tritonclient.grpc as grpcclient

from paged_client import AsyncClient, Client, PagedError
from tests.support.gateway import gateway
from tests.support.in_process import byte_tokenizer
from tests.support.triton import MODEL, idle, metrics, post, raw_stream, tensors
from tests.support.waiting import until

PROMPT = "The sea is"
IDS = byte_tokenizer().encode(PROMPT)


@pytest.fixture(scope="module")
def expected(tiny):
    """Return transformers' embedding of token ids."""

    def embed(ids):
        with torch.inference_mode():
            last = tiny[1].base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        return pytest.approx(torch.nn.functional.normalize(last, dim=0).tolist(), abs=1e-5)

    return embed


def ask(server, embedding_request, **inputs):
    """Return the response of an embedding request, which is the only one and final."""
    with raw_stream(server) as connection:
        connection.send(embedding_request=embedding_request, **inputs)
        (response,) = connection.all()
    return response


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
def test_vllm_backend_embedding_request(tiny_server, expected, prompt):
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    response = ask(tiny_server, {"input": prompt, "pooling_params": {}}, **counts)
    assert response.final
    assert json.loads(response.text) == expected(IDS)
    assert response.outputs["num_input_tokens"] == [len(IDS)]
    assert response.outputs["num_output_tokens"] == [0]
    assert response.outputs.keys() == {"text_output", "num_input_tokens", "num_output_tokens"}
    idle(tiny_server)


def test_embeddings_over_http(tiny_server, expected):
    status, text = post(tiny_server, {"embedding_request": json.dumps({"input": PROMPT}), "return_finish_reason": True})
    answer = json.loads(text)
    assert (status, answer["finish_reason"]) == (200, "stop")
    assert json.loads(answer["text_output"]) == expected(IDS)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_embeddings_through_the_client(tiny_server, expected, protocol):
    with Client(getattr(tiny_server, f"{protocol}_url"), protocol=protocol) as client:
        for given in (PROMPT, IDS):
            embedding = client.embed(given, priority=1, cache_salt="mine")
            assert embedding.values == expected(IDS)
            assert embedding.num_input_tokens == len(IDS)
        with pytest.raises(PagedError, match=r"max_tokens=3: has no effect with embedding_request"):
            client.embed(PROMPT, max_tokens=3)


@pytest.mark.parametrize("encoding", ["float", None])  # by default, OpenAI's package requests base64 and decodes it
def test_embeddings_through_the_gateway(tiny_server, expected, encoding):
    with gateway(tiny_server.grpc_url) as front, openai.OpenAI(base_url=f"{front.url}/v1", api_key="key") as client:
        options = {"encoding_format": encoding} if encoding else {}
        answer = client.embeddings.create(model=MODEL, input=[PROMPT, "x", PROMPT], **options)
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.data[0].embedding == expected(IDS)
        assert answer.data[2].embedding == expected(IDS)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 2 * len(IDS) + 1
        for given, param in (([], "input"), (["x", ""], "input[1]"), ([[5], [320]], "input[1]")):
            with pytest.raises(openai.BadRequestError) as raised:
                client.embeddings.create(model=MODEL, input=given)
            assert raised.value.param == param
        with pytest.raises(openai.BadRequestError, match=r"dimensions=\[8\]: leave it out"):
            client.embeddings.create(model=MODEL, input="x", dimensions=8)


def test_embeddings_concurrent_with_generation(tiny_server, expected):
    """More requests than fit into the pool at once."""

    async def scenario():
        async with AsyncClient(tiny_server.grpc_url) as client:
            prompts = [[*IDS, number] for number in range(40)]
            texts = [client.generate(PROMPT, max_tokens=20, ignore_eos=True) for _ in range(8)]
            both = await asyncio.gather(*map(client.embed, prompts), *texts)
        return prompts, both[: len(prompts)]

    for prompt, embedding in zip(*asyncio.run(scenario()), strict=True):
        assert embedding.values == expected(prompt)
    idle(tiny_server)


@pytest.mark.parametrize(
    ("values", "beside", "named"),
    [
        ({"input": ["a", "b"]}, {}, 'embedding_request.input[0]="a": must be a token id'),
        ({"input": [320]}, {}, "embedding_request.input[0]=320: must be a token id, 0..319"),
        ({"input": "x" * 97}, {}, "prompt_tokens=97: needs 25 blocks"),
        ({"input": [1] * 300}, {}, "prompt_tokens=300: must be 1..256"),
        ({"input": "x", "pooling_params": {"dimensions": [8]}}, {}, "dimensions=[8]: leave it out"),
        ({"input": "x"}, {"stream": True}, "stream=true: must be false with embedding_request"),
        ({"input": "x"}, {"text_input": "x"}, "text_input: has no effect with embedding_request"),
        ({"input": "x"}, {"return_logprobs": True}, "return_logprobs: has no effect with embedding_request"),
        ({"input": "x"}, {"sampling_parameters": {"top_k": 1}}, "top_k=1: has no effect with embedding_request"),
    ],
)
def test_invalid_embedding_requests_are_rejected(tiny_server, values, beside, named):
    error = ask(tiny_server, values, **beside).error
    assert error is not None
    assert str(error).find(named) >= 0, error


def test_truncate_prompt_tokens(tiny_server, expected):
    for given in (PROMPT, IDS):
        response = ask(tiny_server, {"input": given}, sampling_parameters={"truncate_prompt_tokens": 3})
        assert json.loads(response.text) == expected(IDS[-3:])


def test_embeddings_in_a_session_are_rejected(tiny_server):
    with grpcclient.InferenceServerClient(tiny_server.grpc_url) as client, raw_stream(tiny_server) as connection:
        assert client.is_model_ready(MODEL)
        inputs = tensors({"embedding_request": {"input": "x"}})
        connection.client.async_stream_infer(MODEL, inputs, sequence_id=5, sequence_start=True)
        assert "sequence_id=5: not supported with embedding_request" in str(connection.next().error)


def test_an_embedding_timeout_is_an_error(server):
    """The engine is busy prefilling 8,000 tokens."""
    with raw_stream(server) as connection, raw_stream(server) as late:
        connection.send(text_input="x " * 8000, sampling_parameters={"max_tokens": 1})
        inputs = tensors({"embedding_request": {"input": "y " * 8000}})
        late.client.async_stream_infer(MODEL, inputs, timeout=1000)
        assert "DEADLINE_EXCEEDED: the deadline passed before the embedding was computed" in str(late.next().error)
        connection.cancel()
    idle(server)


def test_a_cancelled_embedding_frees_its_blocks(server):
    def ended():
        return metrics(server)["paged_requests_finished_total{cancelled}"]

    before = ended()
    with raw_stream(server) as connection:
        connection.send(embedding_request={"input": "z " * 8000})
        until(lambda: metrics(server)["paged_requests{running}"] == 1, "its first step")
        connection.cancel()
        until(lambda: ended() == before + 1, "its end")
    idle(server)
