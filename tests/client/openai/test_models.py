"""The list of models, and errors that name them."""

import json

import pytest

from paged_client.serving.ports import choose_ports
from tests.support.client_calls import pool_of
from tests.support.fake_servers import SERVERS, grpc_server
from tests.support.gateway import BODIES, error_of, gateway, recording_server

ADAPTERS = [
    {"name": "fr", "rank": 8, "resident": True, "error": None},
    {"name": "broken", "rank": None, "resident": False, "error": "no such file"},
]
UNKNOWN = 'INVALID_ARGUMENT: lora_name="gpt-4": unknown adapter'
ROUTES = {**BODIES, "/v1/embeddings": {"model": "paged_llm", "input": "x"}}


@pytest.fixture
def own():
    """A fake server and a gateway that has not asked it for anything yet."""
    with recording_server() as seen, gateway(seen.url) as front:
        seen.adapters = json.dumps(ADAPTERS)
        yield seen, front


def lengths(front):
    return [card["max_model_len"] for card in front.ask("/v1/models")[1]["data"]]


def test_context_length_is_read_once_there_is_a_server(own):
    fake, front = own
    fake.maps = ["UNAVAILABLE: the engine has not reported its block pool within 60 s"]
    assert lengths(front) == [None, None]
    fake.maps = [json.dumps(pool_of("..") | {"max_model_len": 256})]
    assert lengths(front) == [256, 256]
    fake.maps = ["UNAVAILABLE: the engine has stopped"]
    assert lengths(front) == [256, 256], "remembered"
    assert front.ask("/v1/models/fr")[1]["max_model_len"] == 256


def test_server_is_started_after_the_gateway():
    (port,) = choose_ports(port=0)
    with gateway(f"localhost:{port}") as front, grpc_server(port) as fake:
        fake.maps = [json.dumps(pool_of("..") | {"max_model_len": 512})]
        assert lengths(front) == [512]


def test_older_server_sends_no_context_length(own):
    fake, front = own
    fake.maps = [json.dumps(pool_of(".."))]
    assert lengths(front) == [None, None]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_error_lists_models(own, path, stream):
    fake, front = own
    fake.scripted_response = {"say": [], "fail": UNKNOWN}
    body = ROUTES[path] | {"model": "gpt-4"} | ({} if path == "/v1/embeddings" else {"stream": stream})
    status, answer = front.ask(path, body)
    error = error_of(status, answer)
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert error["message"].startswith("model='gpt-4': neither the model's name nor")
    assert error["message"].endswith("; choose fr, paged_llm")


def test_unknown_name_in_the_path_lists_models(own):
    _, front = own
    status, answer = front.ask("/v1/models/gpt-4")
    assert (status, error_of(status, answer)["message"][-22:]) == (404, "; choose fr, paged_llm")


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in ROUTES), ("/v1/completions", True)])
def test_server_restarted_under_another_name(own, path, stream):
    fake, front = own
    fake.models = {"new": ["text_input", "pool_map"]}
    fake.scripted_response = {"say": ["[1.0]"]}
    body = ROUTES[path] | {"model": "new"} | ({} if path == "/v1/embeddings" else {"stream": stream})
    answer = front.events(path, body)[0] if body.get("stream") else front.ask(path, body)[1]
    assert answer.get("model") == "new"
    assert "lora_name" not in fake.sampling[-1]
    fake.maps = ["UNAVAILABLE: it is not needed here"]
    assert [card["id"] for card in front.ask("/v1/models")[1]["data"]] == ["new", "fr"]
    fake.scripted_response = {"say": [], "fail": UNKNOWN}
    status, answer = front.ask(path, body | {"model": "paged_llm"})
    assert (status, error_of(status, answer)["message"][-15:]) == (404, " choose fr, new")


def test_routes_without_a_body_find_the_new_name(own):
    fake, front = own
    fake.maps = [json.dumps(pool_of("..") | {"max_model_len": 256})]
    assert front.ask("/v1/models/paged_llm")[1]["max_model_len"] == 256
    fake.models = {"new": ["text_input", "pool_map"]}
    fake.maps = [json.dumps(pool_of("..") | {"max_model_len": 512})]
    assert front.ask("/health")[0] == 200
    assert front.ask("/v1/models/new")[1]["max_model_len"] == 512


def test_new_name_that_is_not_known_yet_is_an_error(own):
    fake, front = own
    fake.models = {"other": ["INPUT0"]}
    status, answer = front.ask("/v1/completions", ROUTES["/v1/completions"])
    assert (status, error_of(status, answer)["code"]) == (503, "not_found")
    assert front.ask("/health")[0] == 503


def test_stopped_server_lists_the_model():
    with SERVERS["grpc"]() as seen, gateway(seen.url) as front:
        seen.adapters = "broken"
        seen.script = lambda inputs, request_id: (
            {"adapters": "broken"} if "adapters" in inputs else {"say": [], "fail": UNKNOWN}
        )
        status, answer = front.ask("/v1/completions", {"model": "gpt-4", "prompt": "x"})
        assert (status, error_of(status, answer)["message"][-18:]) == (404, "; choose paged_llm")
