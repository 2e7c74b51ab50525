"""The output of `paged serve` with options, and its log file. test_smoke.py checks that of the demo model."""

import signal
import subprocess
import sys

import pytest

from paged_client.serving.ports import choose_ports
from paged_client.serving.server_files import REPOSITORY_ROOT


@pytest.mark.nightly
def test_start_prints_phases_and_a_summary(tiny, tmp_path):
    log, (http, grpc, metrics) = tmp_path / "serve.log", choose_ports(http=0, grpc=0, metrics=0)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    options = ["--dtype=float32", "--num-gpu-blocks-override=24", "--block-size=4", "--max-model-len=64"]
    options += ["--device=cpu", "--enforce-eager", "--log-file", str(log)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paged_client", "serve", str(tiny[0]), *ports, *options],
        cwd=REPOSITORY_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not process.stdout.readline().startswith("Press Ctrl-C"):
            assert process.poll() is None, process.stderr.read()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    lines = errors.splitlines()
    assert lines[0] == f"Log: {log}"
    for start in (
        "Loading weights: ",
        "Verifying: ",
        "Warming up: ",
        f"Model: {tiny[0]} (LlamaForCausalLM, ",
        "Device: CPU, ",
        "Kernels: ",
        "Data types: weights float32, KV cache float32",
        "Context length: 64 tokens (the model supports ",
        "KV cache: 96 tokens in 24 blocks, ",
        "Loaded in ",
    ):
        assert any(line.startswith(start) for line in lines), (start, errors)
    assert any(line.endswith("WARNING paged_llm.startup: no effect on a CPU: enforce_eager=true") for line in lines)
    assert not [line for line in lines if " INFO " in line or "progress:" in line]
    written = log.read_text()
    assert "INFO paged_llm.startup: Context length: 64 tokens" in written
    assert "Started GRPCInferenceService" in written
