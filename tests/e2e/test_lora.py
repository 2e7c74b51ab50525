"""LoRA adapters on a real server: listed in a file, selected by name, separated in cache and sessions."""

import json

import pytest

from paged_client import Client, PagedError
from tests.support.adapters import generate_with, write_adapter_list
from tests.support.gateway import gateway
from tests.support.in_process import byte_tokenizer, generate_with_transformers
from tests.support.triton import post, raw_stream, raw_streams

PROMPT = "The sea"
CUT = "\ufffd"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
GREEDY |= {"repetition_penalty": 1.0}  # instead of the default of this model


@pytest.fixture(scope="module")
def place(adapters):
    return adapters[0]


@pytest.fixture(scope="module")
def texts(tiny, adapters):
    """Return the text of each adapter and of the base model, without a character that the end truncates."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    tokens = {name: generate_with(tiny[1], path, prompt, 12) for name, path in adapters[1].items()}
    tokens[None] = generate_with_transformers(tiny[1], prompt, 12)
    expected = {name: tokenizer.decode(one).rstrip(CUT) for name, one in tokens.items()}
    assert len(set(expected.values())) == len(expected)
    return expected


@pytest.fixture(params=["grpc", "http"])
def client(request, adapted_server):
    url = {"grpc": adapted_server.grpc_url, "http": adapted_server.http_url}[request.param]
    with Client(url, protocol=request.param) as made:
        yield made


def test_streams_of_different_adapters_at_once(adapted_server, texts):
    names = ["a", None, "b", "a", None]
    with raw_streams(adapted_server, len(names)) as streams:
        for stream, name in zip(streams, names, strict=True):
            stream.send(text_input=PROMPT, stream=True, sampling_parameters=GREEDY | {"lora_name": name})
        for stream, name in zip(streams, names, strict=True):
            assert "".join(one.text or "" for one in stream.all()).rstrip(CUT) == texts[name]


def test_lora_name_as_a_request_parameter(adapted_server, texts):
    ask = {"text_input": PROMPT, "exclude_input_in_output": True, "lora_name": "b"}
    status, body = post(adapted_server, ask | GREEDY)
    assert (status, json.loads(body)["text_output"].rstrip(CUT)) == (200, texts["b"])


def test_an_adapter_is_served_once_it_is_listed(adapted_server, client, place, texts):
    write_adapter_list(place, {"a": "a", "b": "b"})
    with pytest.raises(PagedError) as raised:
        client.generate(PROMPT, lora_name="c", **GREEDY)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert raised.value.message == "LoRA c is not supported, we currently support ['a', 'b']"
    write_adapter_list(place, {"a": "a", "b": "b", "c": "c"})
    assert client.generate(PROMPT, lora_name="c", **GREEDY).text.rstrip(CUT) == texts["c"]
    write_adapter_list(place, {"a": "a", "b": "b"})
    with pytest.raises(PagedError, match="LoRA c is not supported"):
        client.generate(PROMPT, lora_name="c", **GREEDY)


def test_list_adapters(client, place):
    client.generate(PROMPT, lora_name="a", **GREEDY)
    write_adapter_list(place, {"a": "a", "broken": "broken"})
    first, broken = client.adapters()
    assert (first.name, first.rank, first.resident, first.error) == ("a", 4, True, None)
    assert (broken.name, broken.rank, broken.resident) == ("broken", None, False)
    assert broken.error == "its directory: No such file or directory"
    with pytest.raises(PagedError, match=r'lora_name="broken": cannot be used: its directory: No such file'):
        client.generate(PROMPT, lora_name="broken", **GREEDY)
    write_adapter_list(place, {"a": "a", "b": "b"})


def test_a_server_without_adapters_rejects_lora_name(tiny_server):
    with Client(tiny_server.grpc_url) as client:
        assert client.adapters() == ()
    with raw_stream(tiny_server) as stream:
        stream.send(text_input=PROMPT, sampling_parameters={"lora_name": "a"})
        assert stream.next().error.message() == "LoRA feature is not enabled."


def test_session_turns_can_use_different_adapters(client, texts):
    """The text of the session is kept; blocks computed with other weights are not used."""
    with client.conversation(cache_salt=f"{id(client)}", **GREEDY) as talk:
        first = talk.generate(PROMPT, lora_name="a")
        again = talk.generate(" and", lora_name="b")
        assert first.text.rstrip(CUT) == texts["a"]
        assert again.receipt["cached_tokens"] == 0
        more = talk.generate(" so", lora_name="b")
        assert more.receipt["cached_tokens"] > 0


def test_openai_clients_select_adapters_as_models(adapted_server, texts):
    with gateway(adapted_server.grpc_url) as front:
        cards = front.ask("/v1/models")[1]["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [(n, 256) for n in ("paged_llm", "a", "b")]
        for name, adapter in (("paged_llm", None), ("a", "a"), ("b", "b")):
            _, body = front.ask("/v1/completions", {"model": name, "prompt": PROMPT} | GREEDY)
            assert body["choices"][0]["text"].rstrip(CUT) == texts[adapter]
            assert body["model"] == name
        status, body = front.ask("/v1/completions", {"model": "nobody", "prompt": PROMPT})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert body["error"]["message"].endswith("; choose a, b, paged_llm")
