"""Triton's own load generator against the served model."""

import json
import subprocess
import sys

import pytest

from paged_backend.serving.server_files import perf_analyzer
from tests.server.conftest import MODEL, idle


def test_perf_analyzer_streams_with_no_failed_request(server, tmp_path):
    if perf_analyzer() is None:
        pytest.skip("perf_analyzer cannot run on this machine")
    prompts = ["The capital of France is", "Once upon a time", "One, two, three,", "Water boils at"]
    sampling = json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True})
    rows = [{"text_input": [text], "stream": [True], "sampling_parameters": [sampling]} for text in prompts]
    (tmp_path / "in.json").write_text(json.dumps({"data": rows}))
    command = [
        sys.executable,
        "-m",
        "client",
        "perf_analyzer",
        "-m",
        MODEL,
        "-u",
        server.grpc_url,
        "-i",
        "grpc",
        "--async",
        "--streaming",
    ]
    command += ["--input-data", tmp_path / "in.json", "--concurrency-range", "4", "--request-count", "16"]
    command += ["--profile-export-file", tmp_path / "profile.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    requests = experiment["requests"]
    assert len(requests) >= 16
    assert all(request.get("success", True) for request in requests)
    assert all(len(request["response_timestamps"]) >= 2 for request in requests)
    assert "failed" not in done.stdout.lower()
    idle(server)
