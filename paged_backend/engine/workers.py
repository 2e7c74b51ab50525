"""Manages the processes of the other ranks for rank 0: starts them, sends them each step, and detects when one ends."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.engine.rank import Failed, Ready, Start
from paged_backend.execution.runner import RunnerDied
from paged_backend.models.tensor_parallel import TensorParallelGroup, pick_rank_device
from paged_backend.utils.machine import find_python

log = logging.getLogger("paged_llm")

START_SECONDS = 300  # time for a process to import its modules, from a cold disk
REASON_SECONDS = 5  # time for a failing process to send its reason
STOP_SECONDS = 10  # time for a process to end by itself
# A thread of the worker process reads from a pipe that rank 0 holds the other end of. When rank 0 ends in any way, the
# read returns, and the process removes the scratch directory and exits, even if it hangs.
COMMAND = (
    "import os, shutil, sys, threading;"
    "end = lambda: (os.read(int(sys.argv[2]), 1), shutil.rmtree(sys.argv[3], ignore_errors=True), os._exit(0));"
    "threading.Thread(target=end, daemon=True).start();"
    "from paged_backend.engine.rank import main; main(int(sys.argv[1]))"
)


@dataclass(eq=False)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    channel: Connection
    lifeline: int  # write end of a pipe: the process ends when it is closed


class Workers:
    """The processes of all ranks but 0. `send` may be called by one thread at a time."""

    def __init__(self, config: EngineConfig, device: torch.device):
        """Start the processes and join their process group. Raises ConfigError if one cannot start."""
        self.reason: str | None = None  # reason for which a rank has ended
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._stopping = False
        self.workers: list[_Worker] = []
        self._scratch = Path(tempfile.mkdtemp(prefix="paged-ranks-"))
        self.tp_group = TensorParallelGroup(pick_rank_device(device, 0), 0, config.tensor_parallel_size)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, config.tensor_parallel_size):
                self.workers.append(start(rank, self._scratch))
            for worker in self.workers:
                rank_device = pick_rank_device(device, worker.rank)
                _wait_ready(worker, Start(config, rank_device, worker.rank, self.rendezvous))
            self._watcher.start()
            self.tp_group.join(self.rendezvous)
        except BaseException:
            self.stop(at_once=True)
            raise

    @property
    def rendezvous(self) -> Path:
        """The file through which the ranks find each other."""
        return self._scratch / "rendezvous"

    def on_rank_failure(self, callback: Callable[[str], None]) -> None:
        """Register a callback that another thread calls with the reason when a rank ends."""
        self._on_failure = callback
        if self.reason:
            callback(self.reason)

    def send(self, message: Any) -> None:
        """Send a message to all ranks. Raises RunnerDied if one has ended."""
        data = _pickled(message)
        for worker in self.workers:
            try:
                _send(worker, data)
            except OSError as error:
                raise RunnerDied(self.failure_reason() or f"rank {worker.rank} cannot be reached: {error}") from error

    def failure_reason(self) -> str | None:
        """Return why another rank has ended; None if none has. Waits for the reason, which may arrive after rank 0
        finds the connection closed."""
        self._watcher.join(REASON_SECONDS)
        return self.reason

    def stop(self, *, at_once: bool = False) -> None:
        """End the processes. They end by themselves unless a rank has failed or at_once is set."""
        self._stopping = True
        orderly = self._watcher.is_alive() and self.reason is None and not at_once
        for worker in self.workers:
            try:
                if orderly:
                    _send(worker, _pickled(None))
                else:
                    worker.process.kill()
            except OSError:
                worker.process.kill()
        self.tp_group.leave()
        for worker in self.workers:
            try:
                worker.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if self._watcher.is_alive():
            self._watcher.join()
        for worker in self.workers:
            worker.channel.close()
            os.close(worker.lifeline)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _watch(self) -> None:
        """Wait for the first message, or the first connection that closes. Both mean that a rank has failed."""
        ready = wait([worker.channel for worker in self.workers])
        worker = next(worker for worker in self.workers if worker.channel in ready)
        try:
            message = worker.channel.recv()
            reason = message.reason
        except (EOFError, OSError):
            reason = _end_reason(worker)
        if not self._stopping:
            self.reason = f"rank {worker.rank} of {self.tp_group.size} has ended: {reason}"
            self.tp_group.abort()
            log.error(self.reason)
            self._on_failure(self.reason)


class _Pickler(pickle.Pickler):
    """Pickles tensors on the host as NumPy arrays, which is far faster than as tensors."""

    dispatch_table = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}  # noqa: RUF012


def _pickled(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(message)
    return buffer.getvalue()


def start(rank: int, scratch: Path) -> _Worker:
    """Start the process of a rank. scratch: a directory that is removed when rank 0 ends."""
    ours, theirs = socket.socketpair()
    reads, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            [find_python(), "-c", COMMAND, str(theirs.fileno()), str(reads), str(scratch)],
            # The search path for modules is that of this process. LOCAL_RANK selects the GPU in transformers.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), reads),
            start_new_session=True,  # a terminal's Ctrl-C then reaches the server only, which drains open streams
        )
    except OSError as error:
        ours.close()
        os.close(lifeline)
        raise ConfigError(f"tensor_parallel_size: cannot start a process for rank {rank}: {error}") from error
    finally:
        theirs.close()
        os.close(reads)
    return _Worker(rank, process, Connection(ours.detach()), lifeline)


def _send(worker: _Worker, data: bytes) -> None:
    worker.channel.send_bytes(data)


def _wait_ready(worker: _Worker, start: Start) -> None:
    """Send the first message and wait until the rank is ready. Raises ConfigError if it does not start."""
    try:
        _send(worker, _pickled(start))
        if worker.channel.poll(START_SECONDS):
            message = worker.channel.recv()
            if isinstance(message, Ready):
                return
            assert isinstance(message, Failed)
            reason = message.reason
        else:
            reason = f"no answer within {START_SECONDS} s"
    except (EOFError, OSError):
        reason = _end_reason(worker)
    raise ConfigError(f"tensor_parallel_size: rank {worker.rank} did not start: {reason}")


def _end_reason(worker: _Worker) -> str:
    """Return how a process that has closed its connection has ended."""
    try:
        return f"its process ended with code {worker.process.wait(REASON_SECONDS)}"
    except subprocess.TimeoutExpired:
        return "its process has closed the connection"
