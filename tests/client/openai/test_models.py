"""The list of models, and errors that name them."""

import json

import pytest

from paged_client import cli
from paged_client.serving.ports import choose_ports
from tests.support.client_calls import pool_of
from tests.support.fake_servers import SERVERS, grpc_server
from tests.support.gateway import BODIES, CHAT, error_of, gateway, recording_server
from tests.support.tokenizers import write_tokenizer

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
    assert error["message"].startswith("model='gpt-4': neither a model nor an adapter")
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


OURS, OTHER = ["text_input", "pool_map"], ["INPUT0"]


def adapters(*names):
    return {"adapters": json.dumps([{"name": name, "rank": 8, "resident": True, "error": None} for name in names])}


def pool(length=64, **fields):
    return {"map": json.dumps(pool_of("..") | {"max_model_len": length} | fields)}


@pytest.fixture
def several():
    """A fake server with the models a and b, each with an adapter, and another engine's. The gateway of all."""
    with recording_server() as seen:
        seen.models, seen.maps = {"b": OURS, "a": OURS, "other": OTHER}, [pool()["map"]]
        seen.by_model = {
            "a": {"adapters": adapters("fr", "both"), "pool_map": pool(64)},
            "b": {"adapters": adapters("de", "both"), "pool_map": pool(128)},
        }
        with gateway(seen.url) as front:
            yield seen, front


def ids(front):
    return [card["id"] for card in front.ask("/v1/models")[1]["data"]]


class TestSeveralModels:
    def test_all_models_of_the_engine_are_listed_with_their_adapters(self, several):
        _, front = several
        cards = front.ask("/v1/models")[1]["data"]
        assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("a", "a", None, 64), ("fr", "a", "a", 64), ("both", "a", "a", 64),
            ("b", "b", None, 128), ("de", "b", "b", 128), ("both", "b", "b", 128),
        ]  # fmt: skip
        assert front.ask("/v1/models/de")[1]["parent"] == "b"

    @pytest.mark.parametrize("path", ROUTES)
    @pytest.mark.parametrize(
        ("name", "model", "adapter"), [("a", "a", None), ("b", "b", None), ("de", "b", "de"), ("fr", "a", "fr")]
    )
    def test_a_request_goes_to_the_model_it_names(self, several, path, name, model, adapter):
        fake, front = several
        fake.scripted_response = {"say": ["[1.0]"]}
        status, answer = front.ask(path, ROUTES[path] | {"model": name})
        assert (status, answer["model"]) == (200, name)
        assert fake.asked_models[-1] == model
        assert fake.sampling[-1].get("lora_name") == adapter

    def test_streams_and_tokens_come_from_the_model_that_a_request_names(self, several):
        fake, front = several
        (first, *_) = front.events("/v1/completions", {"model": "b", "prompt": "x", "stream": True})
        assert (first["model"], fake.asked_models[-1]) == ("b", "b")
        assert front.ask("/tokenize", {"model": "b", "prompt": "x"})[1]["max_model_len"] == 128
        assert front.ask("/detokenize", {"model": "a", "tokens": [1]})[0] == 200
        assert fake.asked_models[-1] == "a"

    def test_the_model_of_an_adapter_is_asked_for_once(self, several):
        fake, front = several
        for _ in range(2):
            fake.asked_models.clear()
            assert front.ask("/v1/completions", {"model": "de", "prompt": "x"})[0] == 200
        assert fake.asked_models == ["b"]

    def test_an_adapter_that_has_moved_to_another_model_is_found(self, several):
        fake, front = several
        assert front.ask("/v1/completions", {"model": "de", "prompt": "x"})[0] == 200
        fake.by_model["a"]["adapters"], fake.by_model["b"]["adapters"] = adapters("de"), adapters()
        fake.by_model["b"]["text_input"] = {"say": [], "fail": UNKNOWN.replace("gpt-4", "de")}
        assert front.ask("/v1/completions", {"model": "de", "prompt": "x"})[0] == 200
        assert fake.asked_models[-1] == "a"

    @pytest.mark.parametrize("path", ROUTES)
    def test_an_unknown_name_is_an_error_that_lists_all(self, several, path):
        _, front = several
        status, answer = front.ask(path, ROUTES[path] | {"model": "gpt-4"})
        error = error_of(status, answer)
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert error["message"] == "model='gpt-4': neither a model nor an adapter; choose a, b, both, de, fr"

    def test_a_name_that_is_not_clear_is_an_error(self, several):
        _, front = several
        body = {"prompt": "x"}
        for name, reason in (
            ({}, "model: is missing, and there are several; choose a, b"),
            ({"model": "both"}, "model='both': is an adapter of several models (a, b); rename it in all but one of"),
        ):
            status, answer = front.ask("/v1/completions", body | name)
            assert (status, error_of(status, answer)["param"]) == (400, "model")
            assert answer["error"]["message"].startswith(reason)

    def test_models_are_loaded_and_unloaded(self, several):
        fake, front = several
        fake.models = {"a": OURS, "c": OURS}
        assert front.ask("/v1/completions", {"model": "c", "prompt": "x"})[0] == 200
        assert fake.asked_models[-1] == "c"
        status, answer = front.ask("/v1/completions", {"model": "b", "prompt": "x"})
        assert status == 404
        assert answer["error"]["message"].endswith("; choose a, both, c, fr")
        fake.models = {"c": OURS}
        assert ids(front) == ["c"]
        assert front.ask("/v1/completions", {"prompt": "x"})[1]["model"] == "c"
        fake.models = {}
        assert front.ask("/v1/completions", {"model": "c", "prompt": "x"})[0] == 503
        fake.models = {"c": OURS, "a": OURS}
        assert ids(front) == ["a", "fr", "both", "c"]

    def test_an_unloaded_model_is_unknown(self, several):
        fake, front = several
        fake.models = {"a": OURS}
        fake.by_model["a"]["text_input"] = {"say": [], "fail": UNKNOWN.replace("gpt-4", "b")}
        status, answer = front.ask("/v1/completions", {"model": "b", "prompt": "x"})
        assert (status, error_of(status, answer)["code"]) == (404, "model_not_found")

    def test_a_model_that_fails_does_not_hide_the_others(self, several):
        fake, front = several
        failed = {"say": [], "fail": "UNAVAILABLE: the engine has stopped"}
        fake.by_model["a"] = {"adapters": failed, "pool_map": failed}
        assert ids(front) == ["b", "de", "both"]
        assert front.ask("/v1/completions", {"model": "de", "prompt": "x"})[0] == 200
        status, answer = front.ask("/v1/completions", {"model": "fr", "prompt": "x"})
        assert (status, error_of(status, answer)["code"]) == (503, "unavailable"), "it may be an adapter of a"

    @pytest.mark.parametrize(
        ("first", "second", "status"),
        [
            (pool(), {"say": [], "fail": "UNAVAILABLE: no"}, 200),
            (pool(sleeping=True), pool(), 200),
            (pool(sleeping=True), {"say": [], "fail": "UNAVAILABLE: no"}, 503),
            ({"say": [], "fail": "UNAVAILABLE: no"}, {"say": [], "fail": "UNAVAILABLE: no"}, 503),
        ],
    )
    def test_the_gateway_is_ready_with_one_model(self, several, first, second, status):
        fake, front = several
        fake.by_model = {"a": {"pool_map": first}, "b": {"pool_map": second}}
        assert front.ask("/health")[0] == status

    def test_metrics_have_the_model(self, several):
        _, front = several
        front.ask("/v1/completions", {"model": "a", "prompt": "x"})
        front.ask("/v1/completions", {"model": "de", "prompt": "x"})
        front.ask("/v1/completions", {"model": "made-up", "prompt": "x"})
        counted = {name: value for name, value in front.metrics().items() if "requests_total" in name}
        route = 'route="/v1/completions"'
        assert counted == {
            f'paged_openai_requests_total{{model="a",{route},status="200"}}': 1,
            f'paged_openai_requests_total{{model="b",{route},status="200"}}': 1,
            f'paged_openai_requests_total{{model="",{route},status="404"}}': 1,
        }

    def test_only_named_models_are_served(self, several):
        fake, _ = several
        with gateway(fake.url, "--model", "b") as front:
            assert ids(front) == ["b", "de", "both"]
            assert front.ask("/v1/completions", {"prompt": "x"})[1]["model"] == "b"
            fake.by_model["b"]["text_input"] = {"say": [], "fail": UNKNOWN.replace("gpt-4", "a")}
            assert front.ask("/v1/completions", {"model": "a", "prompt": "x"})[0] == 404
        fake.models["c"] = OURS
        with gateway(fake.url, "--model", "c", "--model", "a") as front:
            assert ids(front) == ["c", "a", "fr", "both"]
            assert front.ask("/v1/completions", {"model": "b", "prompt": "x"})[0] == 404


class TestTokenizers:
    """Each model has the chat template of its own tokenizer."""

    @pytest.fixture
    def directories(self, tmp_path):
        made = {}
        for name in ("a", "b"):
            made[name] = write_tokenizer(tmp_path / name, f"{name}:{{{{ messages[0].content }}}}")
        return made

    def test_each_model_has_its_template(self, several, directories):
        fake, _ = several
        flags = [part for name in "ab" for part in ("--tokenizer", f"{name}={directories[name]}")]
        with gateway(fake.url, *flags) as front:
            for name in "ab":
                assert front.ask("/v1/chat/completions", CHAT | {"model": name})[0] == 200
                assert fake.requests[-1]["text_input"] == f"{name}:x"
        with gateway(fake.url, *flags[:2]) as front:
            assert front.ask("/v1/chat/completions", CHAT | {"model": "b"})[0] == 200
            assert "messages" in fake.requests[-1], "the server applies the template"

    def test_a_template_of_the_only_model_is_not_applied_to_one_of_several(self, several, directories):
        fake, _ = several
        fake.models, fake.by_model = {"new": OURS}, {}
        with gateway(fake.url, "--tokenizer", str(directories["a"])) as front:
            fake.models = {"only": OURS}
            assert front.ask("/v1/chat/completions", CHAT | {"model": "only"})[0] == 200
            assert fake.requests[-1]["text_input"] == "a:x"
            fake.models = {"only": OURS, "second": OURS}
            assert ids(front) == ["only", "second"]
            status, answer = front.ask("/v1/chat/completions", CHAT | {"model": "only"})
            reason = "--tokenizer: the server has several models (only, second); the gateway needs it as NAME=DIR"
            assert (status, error_of(status, answer)["message"]) == (503, reason)

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            (["DIR"], "--tokenizer DIR: there are several models (a, b); give it as NAME=DIR"),
            (["DIR", "a=DIR"], "--tokenizer DIR: there are several tokenizers; give each as NAME=DIR"),
            (["a=DIR", "a=DIR"], "--tokenizer a=DIR: a has 2 tokenizers"),
            (["a=DIR", "--model", "b"], "--tokenizer a=DIR: --model does not name a"),
        ],
    )
    def test_a_tokenizer_without_a_clear_model_is_rejected(self, several, capsys, flags, reason):
        fake, _ = several
        given = [part for flag in flags for part in ([flag] if flag in ("--model", "b") else ["--tokenizer", flag])]
        assert cli.main(["openai", "--url", fake.url, *given]) == 2
        assert reason in capsys.readouterr().err

    def test_a_tokenizer_of_a_model_that_is_not_loaded_is_a_warning(self, several, directories, capsys):
        fake, _ = several
        with gateway(fake.url, "--tokenizer", f"later={directories['a']}") as front:
            assert f"later={directories['a']}: the server has no such model; it has a, b" in capsys.readouterr().err
            fake.models["later"] = OURS
            assert front.ask("/v1/chat/completions", CHAT | {"model": "later"})[0] == 200
            assert fake.requests[-1]["text_input"] == "a:x"
