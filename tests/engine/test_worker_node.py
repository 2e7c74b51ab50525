"""`paged worker` with a server that is played by the test."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict

import torch.distributed as dist

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.links import Meeting
from paged_backend.engine.rank import START_KEY
from tests.support.waiting import WAIT


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
