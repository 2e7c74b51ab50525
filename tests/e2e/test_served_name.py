"""A model that is served under another name than paged_llm, and clients that find it."""

import json
import shutil

import pytest

from paged_client import Client
from paged_client.cli import main
from paged_client.serving.server_files import REPOSITORY_ROOT
from paged_client.serving.tritonserver import ServerError, TritonServer
from tests.support.gateway import gateway, gateway_process
from tests.support.triton import idle, post

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head size, float32
OPTIONS = {"dtype": "float32", "served_model_name": "foo.bar-1", "kv_cache_memory_bytes": "4MiB", "swap_space": "1MB"}


@pytest.fixture(scope="module")
def named(tiny):
    with TritonServer(tiny[0], OPTIONS) as running:
        yield running


def test_endpoints_have_the_name(named):
    assert named.model_name == "foo.bar-1"
    body = {"text_input": "x", "max_tokens": 2}
    assert post(named, body, model="foo.bar-1")[0] == 200
    assert post(named, body, model="ensemble")[0] == 200  # it forwards to the engine's model
    assert post(named, body, model="paged_llm")[0] == 404


def test_sizes_of_options_have_units(named):
    with Client(named.grpc_url, named.model_name) as client:
        assert client.pool_map().num_blocks == (4 << 20) // BLOCK_BYTES


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("flags", [[], ["--model", "foo.bar-1"]])
def test_commands_find_the_model(named, capsys, protocol, flags):
    url = named.grpc_url if protocol == "grpc" else named.http_url
    for command in (["generate", "x", "--max-tokens", "2", "--temperature", "0"], ["probe"], ["map", "--once"]):
        assert main([*command, "--url", url, "--protocol", protocol, *flags]) == 0
    idle(named)


def test_gateway_finds_the_model(named):
    with gateway(named.grpc_url) as front:
        (model,) = front.ask("/v1/models")[1]["data"]
        assert model["id"] == "foo.bar-1"
        assert front.ask("/v1/completions", {"model": "foo.bar-1", "prompt": "x", "max_tokens": 2})[0] == 200


def test_gateway_warns_of_an_unreachable_server(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as errors, gateway_process("localhost:9", errors=errors) as front:
        assert "warning: nothing listens at localhost:9: connection refused; requests for this" in log.read_text()
        assert front.ask("/v1/models")[0] == 503


def test_name_must_be_the_directory(tiny, tmp_path):
    """A model repository that Triton serves without `paged serve` may have a model.json with another name."""
    repository = tmp_path / "repository"
    shutil.copytree(REPOSITORY_ROOT / "model_repository", repository, ignore=shutil.ignore_patterns("__pycache__"))
    settings = repository / "paged_llm" / "1" / "model.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"served_model_name": "foo"}))
    reason = "served_model_name='foo': Triton serves this model as 'paged_llm', the name of its directory"
    server = TritonServer(tiny[0], {"dtype": "float32"}, repository=repository, engine_only=True)
    with pytest.raises(ServerError, match=reason), server:
        pass


def test_wrong_ports_and_names_say_what_to_do(named, capsys):
    assert main(["generate", "x", "--url", named.http_url]) == 1
    assert "does not speak gRPC, but probably HTTP\nPass the server's gRPC address" in capsys.readouterr().err
    assert main(["generate", "x", "--url", named.grpc_url, "--protocol", "http"]) == 1
    assert "does not speak HTTP, but probably gRPC\nPass the server's HTTP address" in capsys.readouterr().err
    assert main(["generate", "x", "--url", named.grpc_url, "--model", "other"]) == 1
    assert "Leave --model out to use the model that the server has" in capsys.readouterr().err
