"""A real tritonserver with a model that echoes its options."""

import json
import signal
import tempfile
import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from paged_client.serving.server_files import ServerFiles
from paged_client.serving.tritonserver import ServerError, TritonServer, server_environment
from tests.support.processes import children, is_running, needs_server


def echoed_options(server: TritonServer) -> dict:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/paged_llm/generate_stream"
    request = urllib.request.Request(url, data=b'{"text_input": "x"}')
    with urllib.request.urlopen(request, timeout=60) as reply:
        event = reply.read().decode()
    return json.loads(json.loads(event.removeprefix("data: "))["text_output"])


@pytest.mark.parametrize("flag", ["--http-port=1", "--allow-http=false", "--model-repository=/m"])
def test_reserved_server_options_are_rejected(tmp_path, flag):
    with pytest.raises(ValueError, match=f"{flag}: cannot be set"):
        TritonServer(tmp_path, server_args=["--log-verbose=1", flag])


@needs_server
def test_two_servers_run_side_by_side_and_clean_up(repository, tmp_path):
    with (
        TritonServer(tmp_path, {"seed": 1}, repository=repository) as one,
        TritonServer(tmp_path, {"seed": 2}, repository=repository) as two,
    ):
        assert echoed_options(one) == {"model": str(tmp_path), "block_size": 16, "seed": 1}
        assert echoed_options(two)["seed"] == 2
        prefixes = [one.shm_prefix, two.shm_prefix]
        assert all(list(Path("/dev/shm").glob(f"{prefix}*")) for prefix in prefixes)
        shared = [file for prefix in prefixes for file in Path("/dev/shm").glob(f"{prefix}*")]
        folders = [Path(tempfile.gettempdir(), f"paged-server-{prefix[6:-1]}") for prefix in prefixes]
        assert {file.stat().st_mode & 0o777 for file in shared} == {0o600}, "other users read no requests"
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
        pids = [pid for server in (one, two) for pid in (server.pid, *children(server.pid))]
        assert len(pids) == 4, "a server and a stub each"
    assert "finalized" in one.log()
    assert not any(is_running(pid) for pid in pids)
    assert not any(list(Path("/dev/shm").glob(f"{prefix}*")) for prefix in prefixes)
    assert not any(folder.exists() for folder in folders)
    assert one.stop() == 0, "stopping again changes nothing"


@needs_server
def test_a_server_at_other_addresses(repository, tmp_path):
    places = [f"--{name}-address=127.0.0.{number}" for number, name in enumerate(("http", "grpc", "metrics"), 2)]
    with TritonServer(tmp_path, repository=repository, server_args=places) as server:
        assert server.http_url == f"127.0.0.2:{server.http_port}"
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert client.is_server_live()
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as reply:
            assert reply.status == 200


@needs_server
def test_failed_load_reports_the_models_error(repository, tmp_path):
    server = TritonServer(tmp_path, {"wrong": 1}, repository=repository)
    with pytest.raises(ServerError, match=r"^the model did not load: ValueError: wrong=1: unknown option$"):
        server.__enter__()
    assert not is_running(server.pid)
    assert not list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))


@needs_server
def test_unknown_server_option_is_reported(repository, tmp_path):
    server = TritonServer(tmp_path, repository=repository, server_args=["--nonsense"])
    with pytest.raises(ServerError, match=r"exited with code 1: .*unrecognized option '--nonsense'$"):
        server.__enter__()


@needs_server
def test_load_timeout(repository, tmp_path):
    server = TritonServer(tmp_path, {"load_seconds": 60}, repository=repository)
    server.start()
    with pytest.raises(ServerError, match="not ready after 0 s"):
        server.wait_ready(timeout=0)
    server.kill()
    assert server.stop() == -signal.SIGKILL


def test_api_keys_of_the_gateway_stay_out_of_the_server(monkeypatch):
    monkeypatch.setenv("PAGED_API_KEYS", "secret")
    assert "secret" not in server_environment(ServerFiles(Path("tritonserver"))).values()
