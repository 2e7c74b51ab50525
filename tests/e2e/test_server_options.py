"""A server with options: another name of the model, sizes with units, limits on clients; how it sleeps and stops."""

import json
import os
import shutil
import urllib.error
import urllib.request

import pytest

from paged_client import Client, PagedError
from paged_client.cli import main
from paged_client.serving.server_files import REPOSITORY_ROOT
from paged_client.serving.tritonserver import ServerError, TritonServer
from tests.support.gateway import gateway, gateway_process
from tests.support.processes import children, is_running
from tests.support.triton import ONE_AT_A_TIME, idle, metrics, post, raw_stream, raw_streams
from tests.support.trtllm_streams import ASKED, opened
from tests.support.waiting import WAIT, until

NAME = "foo.bar-1"
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head size, float32


POOL = 1 << 30  # bytes
REQUEST = {"text_input": "once upon", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
LONG = {"text_input": "x", "stream": True, "sampling_parameters": {"ignore_eos": True, "max_tokens": 200}}


@pytest.fixture(scope="module")
def named_server(tiny, tmp_path_factory):
    """A server whose model has another name than paged_llm and a long context, with a pool of 1 GiB, that limits its
    clients."""
    directory = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny[0], directory)
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 1 << 16}
    (directory / "config.json").write_text(json.dumps(config))
    options = {"dtype": "float32", "device": "cpu", "served_model_name": NAME, "first_response_ms": -1}
    options |= {"kv_cache_memory_bytes": "1GiB", "swap_space": "1MB"}
    options |= {"min_priority": 3, "max_tenant_requests": 2, "session_ttl": 0.2, "max_sessions": 2}
    with TritonServer(directory, options, server_args=[ONE_AT_A_TIME]) as running:
        yield running


def test_endpoints_have_the_name(named_server):
    assert named_server.model_name == NAME
    body = {"text_input": "x", "max_tokens": 2}
    assert post(named_server, body, model="foo.bar-1")[0] == 200
    assert post(named_server, body, model="ensemble")[0] == 200  # it forwards to the engine's model
    assert post(named_server, body, model="paged_llm")[0] == 404


def test_sizes_of_options_have_units(named_server):
    with Client(named_server.grpc_url, named_server.model_name) as client:
        assert client.pool_map().num_blocks == POOL // BLOCK_BYTES


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("flags", [[], ["--model", NAME]])
def test_commands_find_the_model(named_server, capsys, protocol, flags):
    url = named_server.grpc_url if protocol == "grpc" else named_server.http_url
    for command in (["generate", "x", "--max-tokens", "2", "--temperature", "0"], ["probe"], ["map", "--once"]):
        assert main([*command, "--url", url, "--protocol", protocol, *flags]) == 0
    idle(named_server, model=NAME)


def test_gateway_finds_the_model(named_server):
    with gateway(named_server.grpc_url) as front:
        (model,) = front.ask("/v1/models")[1]["data"]
        assert model["id"] == "foo.bar-1"
        assert front.ask("/v1/completions", {"model": "foo.bar-1", "prompt": "x", "max_tokens": 2})[0] == 200


def test_gateway_warns_of_an_unreachable_server(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as errors, gateway_process("localhost:9", errors=errors) as front:
        assert "warning: nothing listens at localhost:9: connection refused; requests fail until" in log.read_text()
        assert front.ask("/v1/models")[0] == 503


@pytest.mark.nightly
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


def test_wrong_ports_and_names_say_what_to_do(named_server, capsys):
    assert main(["generate", "x", "--url", named_server.http_url]) == 1
    assert "does not speak gRPC, but probably HTTP\nPass the server's gRPC address" in capsys.readouterr().err
    assert main(["generate", "x", "--url", named_server.grpc_url, "--protocol", "http"]) == 1
    assert "does not speak HTTP, but probably gRPC\nPass the server's HTTP address" in capsys.readouterr().err
    assert main(["generate", "x", "--url", named_server.grpc_url, "--model", "other"]) == 1
    assert "Leave --model out to use the model that the server has" in capsys.readouterr().err


def test_a_server_sleeps_and_wakes(named_server, capsys):
    server, name = named_server, named_server.model_name
    with raw_stream(server, model=name) as stream:
        at = ["--url", server.grpc_url]

        def resident_bytes():
            return metrics(server)["paged_memory_bytes{cpu}"]

        def ask():
            return post(server, REQUEST, model=name)

        status, expected = ask()
        assert status == 200
        until(lambda: ask() and resident_bytes() > 1.25 * POOL)
        stream.send(**LONG)
        assert not stream.next().error
        capsys.readouterr()

        assert main(["sleep", "--model", name, *at]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is asleep: freed 1.00 GiB in ")
        assert not stream.all()[-1].error, "the open request was not finished"
        until(lambda: metrics(server)["paged_sleeping"] == 1)
        assert resident_bytes() < 0.9 * POOL, "the pool was not given back"
        assert metrics(server)["paged_kv_blocks{free}"] == metrics(server)["paged_kv_blocks{total}"]
        assert "UNAVAILABLE: the model is asleep; wake it with `paged wake`" in ask()[1]
        assert main(["probe", *at]) == 0, "it would be restarted"
        assert main(["map", "--once", *at]) == 0
        assert "asleep" in capsys.readouterr().out
        assert main(["sleep", "--model", name, *at]) == 0
        assert capsys.readouterr().out == f"{name} is asleep already\n"

        assert main(["wake", "--model", name, *at]) == 0
        assert capsys.readouterr().out.startswith(f"{name} is awake: restored 1.00 GiB in ")
        until(lambda: metrics(server)["paged_sleeping"] == 0)
        assert ask() == (200, expected)


def send_long(stream, max_tokens=200):
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    stream.send(text_input="x", stream=True, sampling_parameters=sampling)
    first = stream.next()
    assert not first.error, first.error


def test_health_probes_bypass_the_client_limit(named_server):
    """A probe uses the highest priority that clients may have, and does not count against a tenant's limit."""
    with raw_streams(named_server, 2, model=NAME) as streams:
        for stream in streams:
            send_long(stream, max_tokens=60_000)  # more than it gets to compute
        assert post(named_server, {"text_input": "x"}, model=NAME)[0] == 400  # this tenant has reached its limit
        assert main(["probe", "--url", named_server.grpc_url]) == 0
        for stream in streams:
            stream.cancel()
    idle(named_server, model=NAME)


def test_sessions_expire_after_session_ttl(named_server):
    with Client(named_server.grpc_url, NAME) as client:
        client.generate("abcdefgh" * 4, max_tokens=2, sequence_id=1, sequence_start=True)
        until(lambda: metrics(named_server)["paged_sessions"] == 0, "the end of the session")
        until(lambda: metrics(named_server)["paged_kv_blocks{pinned}"] == 0, "the blocks that it lets go of")
        with pytest.raises(PagedError, match=r"expired after session_ttl=0\.2 seconds"):
            client.generate("more", sequence_id=1)
        with client.conversation(max_tokens=2) as talk:
            talk.generate("abc")
            until(lambda: metrics(named_server)["paged_sessions"] == 0, "the end of the session")
            # closing an expired session is not an error


def accepts_http(server):
    """Return whether the server accepts HTTP requests, or at least reports that it is not ready."""
    try:
        urllib.request.urlopen(f"http://{server.http_url}/v2/health/live", timeout=WAIT).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def test_open_streams_finish_after_sigterm_and_nothing_is_left(named_server):
    """Streams of the engine's model and of one that forwards to it. The last test of this server."""
    relayed_request = ASKED | {"max_tokens": [[200]], "return_num_output_tokens": [[True]]}
    with raw_stream(named_server, model=NAME) as direct, opened(named_server, "ensemble") as relayed:
        send_long(direct)
        relayed.send(**relayed_request)
        begun, _ = relayed.next()
        processes = [named_server.pid, *children(named_server.pid)]
        named_server.terminate()
        until(lambda: not accepts_http(named_server), "the end of HTTP")
        assert direct.all()[-1].final
        assert sum(part["num_output_tokens"].item() for part in [begun, *relayed.all()]) == 200
        direct.close()
        relayed.client.stop_stream()
        assert named_server.wait(60) == 0
    named_server.stop()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(named_server.shm_prefix)]
    assert not any(is_running(process) for process in processes)
