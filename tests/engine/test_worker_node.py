"""`paged worker` with a server that is played by the test."""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.distributed.links import Meeting
from paged_backend.engine.rank import START_KEY
from paged_client.serving.ports import choose_ports
from tests.support.in_process import tiny_assembly
from tests.support.waiting import WAIT


@pytest.mark.nightly
def test_rank_that_ends_before_the_start_is_started_again():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = {"model": "none", "tensor_parallel_size": 2, "nnodes": 2, "device": "cpu"}
    config = asdict(EngineConfig.from_options(options | {"master_addr": "127.0.0.1", "master_port": store.port}))
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        meeting.settimeout(WAIT)
        told = {"config": config, "meeting": Meeting("127.0.0.1", meeting.getsockname()[1], "secret")}
        store.set(START_KEY, json.dumps(told))
        command = [sys.executable, "-m", "paged_client", "worker", "--node-rank", "1"]
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        with subprocess.Popen(command, env=environment) as worker:
            try:
                for _ in range(2):
                    meeting.accept()[0].close()  # ends the rank
            finally:
                worker.kill()


@pytest.mark.parametrize("model", [pytest.param("other weights", marks=pytest.mark.nightly), "missing"])
def test_worker_with_another_model_is_rejected(tiny, tmp_path, model):
    """Its weights have the same shapes, so the engine would run, and its tokens would be wrong."""
    other = tmp_path / "other"
    if model == "other weights":
        shutil.copytree(tiny[0], other)
        tensors = load_file(other / "model.safetensors")
        save_file(
            {name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"}
        )
    problem = "file model.safetensors of the model: differs" if other.exists() else f'ConfigError: model="{other}"'
    (port,) = choose_ports(master_port=0)
    command = [sys.executable, "-m", "paged_client", "worker", "--node-rank", "1", "--model", str(other)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    machines = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    with subprocess.Popen(command, env=environment) as worker:
        try:
            with pytest.raises(ConfigError, match=f"rank 1 did not start: machine 1: {problem}"):
                tiny_assembly(tiny[0], **machines)
        finally:
            worker.kill()
