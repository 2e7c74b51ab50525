"""The synchronous client: requests, their errors and time limits."""

import json

import numpy as np
import pytest

from paged_client import Adapter, AsyncClient, Client, Completion, Embedding, PagedError, PoolMap, sync_client
from tests.support.client_calls import pool_of
from tests.support.fake_servers import WAIT


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"protocol": "tcp"}, "protocol='tcp'"),
        ({"url": "http://localhost:8001"}, "url='http://localhost:8001'"),
        ({"url": "ftp://localhost", "protocol": "http"}, "url='ftp://localhost'"),
        ({"headers": {"a b": "x"}}, "the name 'a b'"),
        ({"headers": {"x-id": "é"}}, "the value of 'x-id'"),
    ],
)
def test_invalid_address_is_rejected(client, arguments, named):
    with pytest.raises(ValueError, match=named):
        client(**arguments)


NO_MAPS = [
    ("[]", "INTERNAL"),
    ("{}", "INTERNAL"),
    ("{", "INTERNAL"),
    (json.dumps(pool_of("12", num_blocks=3)), "INTERNAL"),
    (json.dumps(pool_of("1x")), "INTERNAL"),
    (json.dumps(pool_of("")), "INTERNAL"),
    ("UNAVAILABLE: the engine has stopped", "UNAVAILABLE"),
]


def test_pool_map(client, fake):
    fake.maps.append(json.dumps(pool_of("12c.", news="a newer server has more to say")))
    assert client.pool_map(timeout=WAIT) == PoolMap(**pool_of("12c."))
    assert fake.requests == [{"pool_map": True, "request_id": ""}]


def test_adapters(client, fake):
    assert client.adapters() == ()
    broken = {"name": "b", "rank": None, "resident": False, "error": "no file"}
    fake.adapters = json.dumps([{"name": "a", "rank": 8, "resident": True, "news": 1}, broken])
    assert client.adapters(timeout=WAIT) == (Adapter("a", 8, True), Adapter("b", None, False, "no file"))
    assert fake.requests[-1] == {"adapters": True, "request_id": ""}


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"tasks": []}', "3"])
def test_malformed_model_info(client, fake, said):
    fake.model_info = said
    with pytest.raises(PagedError, match="INTERNAL: the server sent no information on its model"):
        client.model_info()


@pytest.mark.parametrize("said", ["{", "[1]", '[{"name": "a"}]', "3"])
def test_malformed_adapter_list(client, fake, said):
    fake.adapters = said
    with pytest.raises(PagedError, match="INTERNAL: the server sent no list of its adapters"):
        client.adapters()


@pytest.mark.parametrize(("said", "code"), NO_MAPS)
def test_malformed_pool_map(client, fake, said, code):
    fake.maps.append(said)
    with pytest.raises(PagedError) as raised:
        client.pool_map()
    assert raised.value.code == code


def test_response_without_pool_map(client, monkeypatch):
    monkeypatch.setattr(sync_client, "POOL_MAP_REQUEST", {"sampling_parameters": '{"say": ["a"]}'})
    with pytest.raises(PagedError, match="INTERNAL: the server sent no map of its pool"):
        client.pool_map()


def test_cancel_by_request_id(client, fake):
    assert [client.cancel("r", timeout=WAIT), client.cancel("s")] == [1, 2]
    assert fake.requests == [{"stop_request": True, "request_id": name} for name in ("r", "s")]
    with pytest.raises(ValueError, match="request_id=''"):
        client.cancel("")


def test_response_without_count(client, monkeypatch):
    monkeypatch.setattr(sync_client, "STOP_REQUEST", {"sampling_parameters": '{"say": ["a"]}'})
    with pytest.raises(PagedError, match="INTERNAL: the server sent no count"):
        client.cancel("r")


def test_embedding(client, fake):
    assert client.embed("hé", timeout=WAIT, say=["[0.6, 0.8]"]) == Embedding((0.6, 0.8), 7)
    ids = client.embed([np.int64(5), 6], dimensions=2, request_id="r", say=["[1]"])
    assert ids == Embedding((1.0,), 7)
    sent = [json.loads(request["embedding_request"]) for request in fake.requests]
    assert sent == [
        {"input": "hé", "pooling_params": {}},
        {"input": [5, 6], "pooling_params": {"dimensions": [2]}},
    ]
    assert fake.requests[1].keys() == {
        "embedding_request", "sampling_parameters", "return_num_input_tokens", "return_receipt", "request_id",
    }  # fmt: skip


def test_embedding_errors(client):
    with pytest.raises(PagedError, match="INVALID_ARGUMENT: no"):
        client.embed("x", say=[], fail="INVALID_ARGUMENT: no")
    for text in ("null", "N/A", '{"a": 1}'):
        with pytest.raises(PagedError, match="INTERNAL: the server sent no embedding"):
            client.embed("x", say=[text])
    for given, named in (("a\ud800", "input: character 1"), ([1.5], "input=1.5: must be a whole number")):
        with pytest.raises(ValueError, match=named):
            client.embed(given)


def test_generate(client, fake, protocol):
    answer = client.generate("hé", request_id="r", say=["a", "é"])
    assert answer == Completion("aé", "stop", 7, 4)
    assert fake.requests[0]["text_input"] == "hé"
    assert fake.requests[0]["request_id"] == "r"
    assert fake.requests[0]["stream"] is (protocol == "http")  # there, only a stream can be cancelled


def test_long_prompt_and_output(client, fake):
    text = "é" * 3_000_000
    assert client.generate(text, say=[text]).text == text
    assert fake.requests[0]["text_input"] == text


def test_cancellation_by_the_server_is_an_error(client):
    with pytest.raises(PagedError) as raised:
        client.generate("x", say=["a"], fail="CANCELLED: by the server")
    assert raised.value.code == "CANCELLED"


def test_unknown_model(fake, protocol):
    with pytest.raises(PagedError) as raised:
        Client(fake.url, "nope", protocol).generate("x")
    assert raised.value.code == "NOT_FOUND"


def test_no_server(protocol):
    with pytest.raises(PagedError) as raised:
        Client("localhost:1", protocol=protocol).generate("x")
    assert raised.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("said", [[], ["a"]])
def test_timeout_cancels_the_request(client, fake, said):
    with pytest.raises(PagedError) as raised:
        client.generate("x", timeout=0.2, say=said, hold=True)
    assert raised.value.code == "DEADLINE_EXCEEDED"
    assert fake.left.wait(WAIT)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_invalid_timeout_is_rejected(client, timeout):
    with pytest.raises(ValueError, match="timeout="):
        client.stream("x", timeout=timeout)
