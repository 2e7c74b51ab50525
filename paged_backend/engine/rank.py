"""The process of a rank other than 0 under tensor parallelism.

Rank 0 is the server's process. Only rank 0 schedules. It sends the integers of each step to the other ranks, so all
ranks move the same blocks and run the same rows, each with its own attention heads.

The process has the environment of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. It ends when its
connection to rank 0 or its standard input is closed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.links import Meeting, connect
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.step_channel import StepChannel
from paged_backend.engine.model_memory import MemoryCommand
from paged_backend.engine.model_preparation import prepare_model
from paged_backend.loading.model_options import pick_device
from paged_backend.models.tensor_parallel import check_devices, pick_rank_device
from paged_backend.scheduling.plan import Plan
from paged_backend.utils.machine import find_python
from paged_kernels.compilations import after_ready

CONNECT_SECONDS = 30
START_KEY = "paged/start"  # in the store while rank 0 waits for the others: JSON with `config` and `meeting`
READY = "ready"  # message of a rank that has imported its modules and can use its device


def start_rank(rank: int, local_rank: int, environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    """Start the process of a rank, which ends with this process. environment: MASTER_ADDR, MASTER_PORT, WORLD_SIZE.
    Raises OSError."""
    return subprocess.Popen(
        [find_python(), "-m", "paged_backend.engine.rank", *arguments],
        # The search path for modules is that of this process. LOCAL_RANK selects the GPU in transformers.
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
        },
        stdin=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C then reaches the server only, which drains open streams
    )


def end_rank(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the process of a rank to end by itself, and kill it if it takes longer."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def run(link: Connection, store: dist.Store, config: EngineConfig, rank: int) -> None:
    """Run the steps that rank 0 sends, until it sends None."""
    transformers_logging.disable_progress_bar()
    check_devices(config, device := pick_device(config))
    device = pick_rank_device(device, int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device=device)  # fails for an unusable GPU, before other ranks wait
    link.send_bytes(READY.encode())
    group = ProcessGroup(device, rank, config.tensor_parallel_size)
    group.join(store, os.environ["MASTER_ADDR"])
    steps = StepChannel()
    prepared = prepare_model(config, group)
    runner = prepared.runner
    if device.type == "cuda":
        after_ready.watch()  # for the log; the metric counts those of rank 0, which runs the same kernels
    while (message := steps.receive()) is not None:
        if isinstance(message, Plan):
            runner.move(message)
        elif isinstance(message, MemoryCommand):
            prepared.memory.run(message)
        else:
            runner.launch(message)
    runner.release_graphs()  # NCCL cannot shut down while graphs hold its calls
    group.leave()


def end_with(link: Connection) -> None:
    """End the process when rank 0 or the process that started this one ends, even if this one hangs."""

    def watch_link() -> None:
        try:
            while link.recv_bytes():
                pass
        except (EOFError, OSError):
            pass
        os._exit(1)

    def watch_parent() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    for watch in (watch_link, watch_parent):
        threading.Thread(target=watch, name=watch.__name__, daemon=True).start()


def main(model: str | None = None) -> None:
    """Run the rank that the environment names. model: the directory of the model on this machine, if it is another one
    than on the server's."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rank, seconds = int(os.environ["RANK"]), timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=seconds)
    start = json.loads(store.get(START_KEY))
    config = EngineConfig.from_options(start["config"])
    link = connect(Meeting(*start["meeting"]), rank, CONNECT_SECONDS)
    end_with(link)
    try:
        run(link, store, replace(config, model=model or config.model), rank)
    except Exception as error:
        link.send_bytes(f"{type(error).__name__}: {error}".encode())
        raise
    os._exit(0)  # the interpreter's own shutdown takes a second


if __name__ == "__main__":
    main(*sys.argv[1:])
