"""Starting and stopping a server, and loads that fail."""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from paged_client.serving import tritonserver
from paged_client.serving.server_files import find_server
from paged_client.serving.tritonserver import ServerError, TritonServer
from tests.support.triton import metrics, plain_server, post, raw_stream
from tests.support.waiting import WAIT

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_plain_tritonserver_serves_the_repository(demo_model):
    """The environment has only what the server of the wheel needs: no wrapper, and no variables of this project."""
    with plain_server(ROOT / "model_repository", without=ROOT) as server:
        status, text = post(server, {"text_input": "The capital of France is", "temperature": 0, "max_tokens": 2})
        assert status == 200
        assert "Paris" in json.loads(text)["text_output"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_seq": 4}, "max_num_seq: unknown engine option; did you mean max_num_seqs?"),
        ({"block_size": 24}, "block_size=24: must be one of"),
        ({"max_model_len": 100_000}, "max_model_len=100000: must be at most 256"),
        ({"load_format": "pickle"}, 'load_format="pickle": must be'),
    ],
)
def test_an_invalid_option_fails_the_load_by_name(tiny, options, reason):
    server = TritonServer(tiny[0], options, engine_only=True)
    try:
        server.start()
        with pytest.raises(ServerError) as caught:
            server.wait_ready()
    finally:
        server.stop()
    assert reason in str(caught.value)


@pytest.mark.nightly
def test_a_broken_model_reports_why_and_others_serve(tiny, tmp_path):
    """One of the server's two models has a truncated file."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny[0], broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    for name, place in {"good": tiny[0], "bad": broken}.items():
        model = tmp_path / "models" / name
        shutil.copytree(ROOT / "model_repository/paged_llm", model)
        config = model / "config.pbtxt"
        config.write_text(re.sub(r'(?m)^name: ".*"$', f'name: "{name}"', config.read_text()))
        (model / "1/model.json").write_text(json.dumps({"model": str(place), "dtype": "float32"}))
    with plain_server(tmp_path / "models", "--exit-on-error=false") as server:
        status, text = post(server, {"text_input": "x", "temperature": 0, "max_tokens": 2}, model="good")
        assert status == 200, text
        request = urllib.request.Request(f"http://{server.http_url}/v2/repository/index", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=WAIT) as reply:
            models = {one["name"]: one for one in json.loads(reply.read())}
    assert models["good"]["state"] == "READY"
    assert models["bad"]["state"] == "UNAVAILABLE"
    assert f"ConfigError: {broken}/model.safetensors: " in models["bad"]["reason"]


@pytest.mark.nightly
def test_fp8_kv_cache_with_prefix_cache_hits(demo_model):
    options = {"dtype": "float32", "kv_cache_dtype": "fp8", "num_gpu_blocks_override": 64}
    request = {"text_input": "The capital of France is Paris. The capital of Germany is", "temperature": 0}
    with TritonServer(demo_model, options, engine_only=True) as server:
        replies = [post(server, request | {"max_tokens": 6}) for _ in range(2)]
        assert metrics(server)["paged_prefix_cache_hit_tokens_total"] > 0
    assert [status for status, _ in replies] == [200, 200]
    assert "Berlin" in json.loads(replies[0][1])["text_output"]
    assert replies[1] == replies[0]


@pytest.mark.nightly
def test_shutdown_waits_only_for_open_streams(tiny, monkeypatch):
    """A stopping server that still sends responses is not ended early, and one that has finished is not waited for."""
    monkeypatch.setattr(tritonserver, "UNLOAD_TIMEOUT", 0)
    with TritonServer(tiny[0], {"dtype": "float32"}, engine_only=True) as server, raw_stream(server) as stream:
        stream.send(text_input="x", stream=True, sampling_parameters={"max_tokens": 250, "ignore_eos": True})
        assert not stream.next().error
        server.stop()
        assert stream.all()[-1].final


def test_the_stub_uses_this_interpreter(tiny_server):
    if find_server().backend_directory is None:
        pytest.skip("an installed server brings its own stub")
    stubs = subprocess.run(["pgrep", "-f", tiny_server.shm_prefix], capture_output=True, text=True, check=True)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in stubs.stdout.split()]
    assert any(f"libpython{sys.version_info.major}.{sys.version_info.minor}" in text for text in maps)
