"""Rank 0's hold on the other ranks: starts their processes, sends them each step, and notices when one is gone."""

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
from paged_backend.execution.batch import PackedBatch
from paged_backend.execution.runner import LaunchedStep, Runner, RunnerDied
from paged_backend.models.tensor_parallel import TensorParallelGroup, pick_rank_device
from paged_backend.scheduling.plan import Plan
from paged_backend.scheduling.step_result import StepResult
from paged_backend.utils.machine import find_python

log = logging.getLogger("paged_llm")

START_SECONDS = 300  # for a process to import what it needs, from a cold disk
REASON_SECONDS = 5  # for a process that fails to say why
STOP_SECONDS = 10  # for a process to end by itself
# Rank 0 holds the other end of a pipe, so reading ends when rank 0 does, whatever this process waits for by then. If it
# was killed, nobody else is left to remove where the ranks have met.
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
    lifeline: int  # a pipe that nothing is written to: the process ends when this end is closed


class Workers:
    """The processes of ranks 1 and up. `send` is called by one thread at a time."""

    def __init__(self, config: EngineConfig, device: torch.device):
        """Start them, and wait until they can meet. Raises ConfigError where one cannot start."""
        self.reason: str | None = None  # why a rank is gone
        self._on_death: Callable[[str], None] = lambda reason: None
        self._stopping = False
        self.workers: list[_Worker] = []
        self._scratch = Path(tempfile.mkdtemp(prefix="paged-ranks-"))
        self.tp_group = TensorParallelGroup(pick_rank_device(device, 0), 0, config.tensor_parallel_size)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, config.tensor_parallel_size):
                self.workers.append(start(rank, self._scratch))
            for worker in self.workers:
                here = pick_rank_device(device, worker.rank)
                _meet(worker, Start(config, here, worker.rank, self.rendezvous))
            self._watcher.start()
            self.tp_group.join(self.rendezvous)
        except BaseException:
            self.stop(at_once=True)
            raise

    @property
    def rendezvous(self) -> Path:
        return self._scratch / "rendezvous"

    def on_rank_failure(self, on_death: Callable[[str], None]) -> None:
        """Have `on_death` called with the reason, from another thread, once a rank is gone."""
        self._on_death = on_death
        if self.reason:
            on_death(self.reason)

    def send(self, message: Any) -> None:
        """The same to all. Raises RunnerDied where a rank is gone."""
        data = _pickled(message)
        for worker in self.workers:
            try:
                _send(worker, data)
            except OSError as error:
                raise RunnerDied(self.failure_reason() or f"rank {worker.rank} cannot be reached: {error}") from error

    def failure_reason(self) -> str | None:
        """Why rank 0 failed, if another rank is why. It may notice the end of a connection before it is told more."""
        self._watcher.join(REASON_SECONDS)
        return self.reason

    def stop(self, *, at_once: bool = False) -> None:
        """End them: by themselves where all is well, else at once."""
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
        """Until the first message or end: a rank that is well has nothing to say."""
        ready = wait([worker.channel for worker in self.workers])
        worker = next(worker for worker in self.workers if worker.channel in ready)
        try:
            message = worker.channel.recv()
            reason = message.reason
        except (EOFError, OSError):
            reason = _end(worker)
        if not self._stopping:
            self.reason = f"rank {worker.rank} of {self.tp_group.size} is gone: {reason}"
            self.tp_group.abort()
            log.error(self.reason)
            self._on_death(self.reason)


class ParallelRunner:
    """Rank 0's runner: what it does, the other ranks do at the same time."""

    def __init__(self, runner: Runner, workers: Workers):
        self._runner = runner
        self.workers = workers
        self.kv, self.host, self.drafter, self.transfers = runner.kv, runner.host, runner.drafter, runner.transfers
        self.gqa_group, self.uniform = runner.gqa_group, runner.uniform

    def move(self, plan: Plan) -> None:
        if plan.moves_out or plan.moves_in or plan.copies:
            moves_out, moves_in = (
                tuple(move._replace(entry=None) for move in moves) for moves in (plan.moves_out, plan.moves_in)
            )
            self.workers.send(Plan((), moves_out=moves_out, moves_in=moves_in, copies=plan.copies))
        self.run_or_fail(lambda: self._runner.move(plan))

    def launch(self, packed: PackedBatch) -> ParallelStep:
        self.workers.send(packed)
        return ParallelStep(self.run_or_fail(lambda: self._runner.launch(packed)), self)

    def release_graphs(self) -> None:
        self._runner.release_graphs()

    def run_or_fail(self, action: Callable[[], Any]) -> Any:
        """The ranks have diverged where one has failed, so there is no step after that."""
        try:
            return action()
        except Exception as error:
            raise RunnerDied(self.workers.failure_reason() or f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class ParallelStep:
    """A step that all ranks have launched."""

    launched: LaunchedStep
    runner: ParallelRunner

    def result(self) -> StepResult:
        return self.runner.run_or_fail(self.launched.result)


class _Pickler(pickle.Pickler):
    """Tensors of the host travel as numpy's arrays: their own way to be pickled takes far longer."""

    dispatch_table = {Tensor: lambda tensor: (torch.from_numpy, (tensor.numpy(),))}  # noqa: RUF012


def _pickled(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(message)
    return buffer.getvalue()


def start(rank: int, scratch: Path) -> _Worker:
    """scratch: a directory that goes with rank 0."""
    ours, theirs = socket.socketpair()
    reads, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            [find_python(), "-c", COMMAND, str(theirs.fileno()), str(reads), str(scratch)],
            # As this process finds its modules. LOCAL_RANK tells transformers which GPU is this rank's.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), reads),
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which lets open streams end
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


def _meet(worker: _Worker, start: Start) -> None:
    try:
        _send(worker, _pickled(start))
        if worker.channel.poll(START_SECONDS):
            message = worker.channel.recv()
            if isinstance(message, Ready):
                return
            assert isinstance(message, Failed)
            reason = message.reason
        else:
            reason = f"said nothing for {START_SECONDS} s"
    except (EOFError, OSError):
        reason = _end(worker)
    raise ConfigError(f"tensor_parallel_size: rank {worker.rank} did not start: {reason}")


def _end(worker: _Worker) -> str:
    """Of a process that has closed its channel."""
    try:
        return f"its process ended with code {worker.process.wait(REASON_SECONDS)}"
    except subprocess.TimeoutExpired:
        return "its process has closed the connection"
