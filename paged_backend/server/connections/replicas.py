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
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import GenerateRequest
from paged_backend.engine.outputs import Emit
from paged_backend.engine.remote_engine import RemoteEngine, read_stats
from paged_backend.engine.router import Router
from paged_backend.files.start_checks import check_replicas
from paged_backend.loading.description import pick_device
from paged_backend.scheduling.stats import Stats
from paged_backend.server.placement import replica_gpus
from paged_backend.utils import failure, local_socket
from paged_backend.utils.child_process import end_process, start_module
from paged_backend.utils.local_socket import Connection
from paged_backend.utils.machine import omp_num_threads, usable_cores

log = logging.getLogger("paged_llm")

MODULE = "paged_backend.server.connections.replica"  # the process of a replica
STOP_SECONDS = 10  # time for a replica to end by itself
MAX_KNOWN_BLOCKS = 1 << 17  # hashes remembered for each replica; the least recently used are forgotten
HELD_SHARE = 0.5  # share of a prompt that a replica must have computed to be preferred to one with fewer open requests
# A replica with more open requests than this is not preferred: a multiple of the mean, and the mean plus a few, since
# small differences cost less than an empty cache.
LOAD_FACTOR, LOAD_SLACK = 1.25, 8


def options_of(config: EngineConfig) -> dict[str, object]:
    """Return a replica's options: the model's, except options that the first process applies for all replicas."""
    own = {"data_parallel_size": 1, "disable_log_stats": True, "otlp_traces_endpoint": None}
    return asdict(config) | own


class Replicas:
    """The replicas other than this process's engine, which has the number 0. Implements `RequestOwner`."""

    def __init__(self, config: EngineConfig, labels: Mapping[str, str], listing: Path | None):
        """Start `data_parallel_size` - 1 processes, and do not wait for them.

        labels: name and version of the model. listing: the file that lists LoRA adapters. Raises ConfigError.
        """
        count = config.data_parallel_size
        self._max_frame_bytes = config.limits.max_frame_bytes
        self._choice = ReplicaChoice(count, config.block_size)
        self._lock = threading.Lock()  # guards the choice
        self._processes: list[subprocess.Popen[bytes]] = []
        self._engines: list[RemoteEngine] = []
        self._router: Router | None = None
        self._stopping = False
        share_cores(count)
        start = {
            "model": labels["model"],
            "version": labels.get("version", ""),
            "listing": str(listing) if listing else None,
            "options": options_of(config),
        }
        try:
            for number in range(1, count):
                first = json.dumps(start | {"number": number}).encode() + b"\n"
                environment = device_environment(config, number)
                process = start_module(MODULE, first=first, environment=environment, stdout=subprocess.PIPE)
                self._processes.append(process)
        except BaseException as error:
            self.stop()
            if isinstance(error, OSError):
                raise ConfigError(f"data_parallel_size={count}: cannot start a process: {error}") from error
            raise

    def connect(self, router: Router, emit: Emit) -> None:
        """Wait until the replicas have loaded the model, and connect to them.

        router: this process's router. emit: receives the outputs of the replicas. Raises ConfigError if a replica does
        not start.
        """
        self._router = router
        for number, process in enumerate(self._processes, 1):
            answer = _first_answer(number, process)
            connection = Connection(local_socket.connect(answer["socket"]), self._max_frame_bytes)
            stats = read_stats(answer["stats"])
            name = f"replica {number}"
            on_end = partial(self._report_end, name)
            self._engines.append(RemoteEngine(name, connection, emit, self, stats, title=name, on_end=on_end))
            log.info("replica %d of %d is ready", number, len(self._processes) + 1)

    def place(self, request: GenerateRequest) -> bool:
        """Send a request to a replica, if one is the best choice. Return whether it was sent."""
        if not request.can_move:
            return False
        assert self._router
        owner = request.sampling.cache_salt, request.sampling.lora_name
        with self._lock:
            own = max(0, self._router.own.num_open - 1)  # without this request
            loads = [own, *(engine.num_open for engine in self._engines)]
            number = self._choice.choose(owner, request.prompt_token_ids, loads)
        if number == 0:
            return False
        self._router.send(request, self._engines[number - 1])
        return True

    def problem(self) -> str | None:
        """Return why requests cannot be answered; None if they can."""
        ended = (engine.name for engine in self._engines if not engine.alive)
        return next((f"{name} has ended; reload the model" for name in ended), None)

    @property
    def waiting(self) -> int:
        """The number of requests that wait in the replicas."""
        return sum(engine.stats.waiting for engine in self._engines if engine.stats)

    def add_stats(self, stats: Stats) -> Stats:
        """Return statistics of this process's engine with the replicas' statistics added."""
        for engine in self._engines:
            if engine.stats:
                stats = stats.plus(engine.stats)
        return stats

    def on_started(self, key: int) -> None:
        pass

    def on_ended(self, key: int) -> None:
        assert self._router
        self._router.remove(key)

    def on_returned(self, engine: RemoteEngine, request: GenerateRequest, rejected: str | None) -> None:
        """Run a request here that a replica cannot run, or had not begun to answer when it ended."""
        assert self._router
        log.warning("a request of %s runs in the first engine: %s", engine.name, rejected or "the replica has ended")
        self._router.put_back(replace(request, stays=True))

    def _report_end(self, name: str) -> None:
        if not self._stopping:
            failure.report(f"{name} has ended{failure.OTHERS_GO_ON}")

    def stop(self) -> None:
        """End the processes."""
        self._stopping = True
        for engine in self._engines:
            engine.close()
        for process in self._processes:
            assert process.stdin
            process.stdin.close()
        for process in self._processes:
            end_process(process, STOP_SECONDS)


def device_environment(config: EngineConfig, number: int) -> dict[str, str]:
    """Return the environment in which a replica sees its own GPUs; on a CPU it is empty. Raises ConfigError."""
    if pick_device(config).type != "cuda":
        return {}
    check_replicas(config, torch.cuda.device_count())
    gpus = replica_gpus(number, config.ranks_per_node, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {"CUDA_VISIBLE_DEVICES": gpus}


def share_cores(count: int) -> None:
    """Divide the cores among `count` processes, including this one."""
    threads = max(1, min(omp_num_threads() or usable_cores(), usable_cores() // count))
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _first_answer(number: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the answer of a replica once it is ready. Raises ConfigError."""
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise ConfigError(
            f"data_parallel_size: replica {number} did not start: its process ended with {process.wait()}"
        )
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise _did_not_start(number, answer["error"])
    return answer


def _did_not_start(number: int, reason: str) -> ConfigError:
    return ConfigError(f"data_parallel_size: replica {number} did not start: {reason}")


class ReplicaChoice:
    """Chooses the replica that has computed most of the prompt's beginning, unless it is overloaded.

    Like a cache-aware router (Zheng et al.: SGLang, 2024, section 3) it remembers the prompts that were sent to each
    replica, as a chain of hashes of their blocks. What a replica has evicted since is not known. Used by one thread at
    a time.
    """

    def __init__(self, count: int, block_size: int):
        """count: the number of replicas."""
        self._block_size = block_size
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def choose(self, owner: Hashable, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of the replica that should run a prompt, and remember the choice.

        Args:
            owner: what a cached block belongs to besides its tokens: the tenant's salt and the adapter.
            prompt: token ids.
            loads: open requests of each replica.
        """
        chain = self._chain(owner, prompt)
        mean = (sum(loads) + 1) / len(loads)
        capacity = math.ceil(max(LOAD_FACTOR * mean, mean + LOAD_SLACK))
        held = [self._held(number, chain) for number in range(len(loads))]

        def badness(number: int) -> tuple[float, float]:
            prefers = chain and held[number] >= HELD_SHARE * len(chain) and loads[number] < capacity
            return -held[number] if prefers else 0.0, loads[number]

        best = min(range(len(loads)), key=badness)
        known = self._known[best]
        for block in chain:
            known[block] = None
            known.move_to_end(block)
        while len(known) > MAX_KNOWN_BLOCKS:
            known.popitem(last=False)
        return best

    def _chain(self, owner: Hashable, prompt: Sequence[int]) -> list[int]:
        """Return a hash for each full block of a prompt. It covers the prompt up to the end of the block."""
        size, parent, chain = self._block_size, hash(owner), []
        for start in range(0, len(prompt) - size + 1, size):
            parent = hash((parent, *prompt[start : start + size]))
            chain.append(parent)
        return chain

    def _held(self, number: int, chain: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt the replica has computed."""
        known = self._known[number]
        return next((index for index, block in enumerate(chain) if block not in known), len(chain))
