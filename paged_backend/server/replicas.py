"""Data parallelism: several engines behind one model, selected by the beginning of the prompt and by load.

    clients -> admission, streams, sessions, metrics (this process)
                 |               |               |
               engine         replica 1       replica 2        processes of their own, with GPUs of their own
             (this process)   (local socket)  (local socket)
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.moved_requests import MovedRequests
from paged_backend.engine.outputs import Emit
from paged_backend.engine.remote_engine import RemoteEngine
from paged_backend.scheduling.stats import SchedulerStats
from paged_backend.server.placement import replica_gpus
from paged_backend.server.replica import ReplicaStart, options_of, start_replica
from paged_backend.server.replica_choice import ReplicaChoice
from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import Connection
from paged_backend.utils.machine import omp_num_threads, usable_cores

log = logging.getLogger("paged_llm")

STOP_SECONDS = 10  # time for a replica to end by itself


class Replicas:
    """The replicas other than this process's engine, which has the number 0. Implements `RequestOwner`."""

    def __init__(self, config: EngineConfig, model: str, version: str, listing: str | None):
        """Start the processes, and do not wait for them.

        model: name of the model for clients. listing: the file that lists LoRA adapters. Raises ConfigError.
        """
        count = config.data_parallel_size
        self._max_frame_bytes = config.limits.max_frame_bytes
        self._choice = ReplicaChoice(count, config.block_size)
        self._processes: list[subprocess.Popen[str]] = []
        self._engines: list[RemoteEngine] = []
        self._moved: MovedRequests | None = None
        self._num_open: Callable[[], int] = lambda: 0
        options = options_of(config)
        try:
            for number in range(1, count):
                gpus = replica_gpus(number, config.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES"))
                start = ReplicaStart(number, model, version, listing, options)
                self._processes.append(start_replica(start, {"CUDA_VISIBLE_DEVICES": gpus}))
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ConfigError(f"data_parallel_size={count}: cannot start a process: {error}") from error
            raise

    def connect(self, moved: MovedRequests, emit: Emit, num_open: Callable[[], int]) -> None:
        """Wait until the replicas have loaded the model, and connect to them.

        moved: of this process's engine. emit: receives the outputs of the replicas. num_open: returns the number of
        open requests of this process. Raises ConfigError if a replica does not start.
        """
        self._moved, self._num_open = moved, num_open
        for number, process in enumerate(self._processes, 1):
            name = _socket_of(number, process)
            connection = Connection(local_socket.connect(name), self._max_frame_bytes)
            self._engines.append(RemoteEngine(f"replica {number}", connection, emit, self))
        log.info("%d replicas serve the model", len(self._engines) + 1)

    def place(self, request: GenerateRequest) -> bool:
        """Send a request to a replica, if one is the best choice. Return whether it was sent."""
        if request.embeds or not self._engines:
            return False
        others = [engine.num_open if engine.alive else math.inf for engine in self._engines]
        own = self._num_open() - sum(engine.num_open for engine in self._engines)
        sampling = request.sampling
        number = self._choice.choose((sampling.cache_salt, sampling.lora_name), request.prompt_token_ids, [own, *others])
        if number == 0:
            return False
        assert self._moved
        self._moved.send(request, self._engines[number - 1])
        return True

    @property
    def waiting(self) -> int:
        """The number of requests that wait in the replicas."""
        return sum(engine.stats.waiting for engine in self._engines if engine.stats)

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics of this process's engine with those of the replicas added."""
        for engine in self._engines:
            if engine.stats and engine.alive:
                stats = stats.plus(engine.stats)
        return stats

    def on_ended(self, key: int) -> None:
        assert self._moved
        self._moved.remove(key)

    def on_returned(self, engine: RemoteEngine, request: GenerateRequest, rejected: str | None) -> None:
        """Run a request here that a replica cannot run."""
        assert self._moved
        log.warning("%s returned a request, which runs in the first engine: %s", engine.name, rejected)
        self._moved.put_back(replace(request, stays=True))

    def stop(self) -> None:
        """End the processes."""
        for engine in self._engines:
            engine.close()
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout
            process.stdout.close()


def share_cores(count: int) -> None:
    """Give each of `count` processes its part of the cores, this one included."""
    threads = max(1, min(omp_num_threads() or usable_cores(), usable_cores() // count))
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _socket_of(number: int, process: subprocess.Popen[str]) -> str:
    """Return the name of a replica's socket, once it is ready. Raises ConfigError."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise ConfigError(f"data_parallel_size: replica {number} did not start: its process ended with {process.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise ConfigError(f"data_parallel_size: replica {number} did not start: {answer['error']}")
    return str(answer["socket"])
