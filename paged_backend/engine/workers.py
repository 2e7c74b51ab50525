"""The other ranks, as rank 0 sees them: it starts the ranks of this machine, sends each step to all, and notices when
one ends."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.secrets import MIN_KEY_BYTES
from paged_backend.distributed.group_sockets import close_port
from paged_backend.distributed.links import LinkListener, hang_up
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.distributed.step_channel import StepChannel
from paged_backend.distributed.topology import Topology, cluster_secret, listen
from paged_backend.engine.rank import (
    READY,
    START_KEY,
    STEP_MESSAGES,
    Invitation,
    Start,
    options_of,
    start_rank,
    write_invitation,
)
from paged_backend.engine.rank_facts import Facts, find_difference, rank_facts
from paged_backend.execution.runner import RunnerDied
from paged_backend.loading.model_source import find_model
from paged_backend.models.tensor_parallel import pick_rank_device
from paged_backend.utils.child_process import end_process

log = logging.getLogger("paged_llm")

START_SECONDS = 300  # time for a process to import its modules, from a cold disk
REASON_SECONDS = 6  # time to notice a broken connection, or for a failing process to send its reason
GATHER_SECONDS = 0.1  # after the first sign of a failed rank, time for others to tell the cause from its effects
STOP_SECONDS = 10  # time for a process to end by itself
REMINDER_SECONDS = 30  # between two log lines that name machines that are missing


class Workers:
    """All ranks but 0. `send` may be called by one thread at a time."""

    def __init__(self, config: EngineConfig, device: torch.device, topology: Topology):
        """Start the ranks of this machine, wait for the ranks of other machines, and join them all.

        Raises ConfigError if a rank does not start.
        """
        self.reason: str | None = None  # reason for which a rank has ended
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._stopping = False
        self._topology = topology
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank, on this machine
        self._links: dict[int, Connection] = {}
        self._steps: StepChannel | None = None
        self._store_port: socket.socket | None = None
        self._secret = cluster_secret() if topology.num_nodes > 1 else secrets.token_bytes(MIN_KEY_BYTES)
        self._told = Start(options_of(config), secrets.token_hex())
        self.group = ProcessGroup(pick_rank_device(device, 0), 0, topology.size, self._told.key(self._secret))
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            self._start(config)
        except BaseException:
            self.stop(at_once=True)
            raise

    def close_store(self) -> None:
        """Close the store to everyone else. Called once all groups of the ranks exist."""
        if self._store_port:
            with suppress(OSError):
                close_port(self._store_port)
            self._store_port.close()
            self._store_port = None

    def on_rank_failure(self, callback: Callable[[str], None]) -> None:
        """Register a callback that another thread calls with the reason when a rank ends."""
        self._on_failure = callback
        if self.reason:
            callback(self.reason)

    def send(self, message: Any) -> None:
        """Send a message to all ranks. Raises RunnerDied if a rank has ended."""
        assert self._steps
        try:
            self._steps.send(message)
        except RuntimeError as error:
            raise RunnerDied(self.failure_reason() or f"a rank cannot be reached: {error}") from error

    def failure_reason(self) -> str | None:
        """Return why another rank has ended; None if none has. Waits for the reason, which may arrive after rank 0
        finds the connection closed."""
        if self._watcher.ident is not None:
            self._watcher.join(REASON_SECONDS)
        return self.reason

    def stop(self, *, at_once: bool = False) -> None:
        """End the ranks. They end by themselves unless one has failed or at_once is set."""
        self._stopping = True
        self.close_store()
        if self._watcher.is_alive() and self.reason is None and not at_once and self._steps:
            try:
                self._steps.send(None)
                self._watcher.join(STOP_SECONDS)  # until a rank has ended
            except RuntimeError:  # the end of the links ends the ranks as well
                log.warning("the ranks cannot be reached any more")
        else:
            for process in self.processes.values():
                process.kill()
        self.group.leave()
        for process in self.processes.values():
            end_process(process, STOP_SECONDS)
        for link in self._links.values():
            hang_up(link)
        if self._watcher.is_alive():
            self._watcher.join()
        for link in self._links.values():
            link.close()

    def _start(self, config: EngineConfig) -> None:
        topology = self._topology
        with listen(topology) as listening:
            port = listening.getsockname()[1]
            self._store_port = listening.dup()
            store = dist.TCPStore(
                topology.master_addr,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        listener = LinkListener(topology.master_addr, self._secret, json.dumps(self._told).encode())
        invitation = Invitation(listener.meeting, topology.size, topology.num_nodes)
        environment = topology.environment(port)
        try:
            store.set(START_KEY, write_invitation(invitation, self._secret))
            for rank in list(topology.ranks_of(0))[1:]:
                try:
                    self.processes[rank] = start_rank(rank, rank, self._secret, environment)
                except OSError as error:
                    raise ConfigError(
                        f"tensor_parallel_size: cannot start a process for rank {rank}: {error}"
                    ) from error
            self._links = listener.accept(topology.size - 1, _Patience(self.processes, topology).check)
            store.delete_key(START_KEY)  # a rank that ends before this is started again by `paged worker`
        finally:
            listener.close()
        own = rank_facts(find_model(config))
        for rank, link in self._links.items():
            self._wait_ready(rank, link, own)
        self._watcher.start()
        self.group.join(store, topology.master_addr)
        self._steps = StepChannel(self.group.key, *STEP_MESSAGES)

    def _wait_ready(self, rank: int, link: Connection, own: Facts) -> None:
        try:
            reason = link.recv_bytes().decode() if link.poll(START_SECONDS) else f"no answer within {START_SECONDS} s"
        except (EOFError, OSError):
            reason = self._end_reason(rank)
        if not reason.startswith(READY):
            raise self._did_not_start(rank, reason)
        if difference := find_difference(own, json.loads(reason.removeprefix(READY))):
            raise self._did_not_start(rank, difference)

    def _watch(self) -> None:
        """Wait for the first message, or the first connection that closes. Both mean that a rank has failed."""
        wait(self._links.values())
        if not self._stopping:
            time.sleep(GATHER_SECONDS)
        ready = wait(self._links.values(), 0)
        reasons: dict[int, str] = {}
        ended: dict[int, Exception] = {}  # without a reason: others only find that their connections to it are closed
        for rank, link in self._links.items():
            if link in ready:
                try:
                    reasons[rank] = link.recv_bytes().decode()
                except (EOFError, OSError) as error:
                    ended[rank] = error
        rank = next(iter(ended or reasons))
        reason = self._end_reason(rank, ended[rank]) if ended else reasons[rank]
        if not self._stopping:
            self.reason = f"rank {rank} of {self._topology.size} has ended: {reason}"
            self.group.abort()
            log.error(self.reason)
            self._on_failure(self.reason)

    def _did_not_start(self, rank: int, reason: str) -> ConfigError:
        node = rank // self._topology.ranks_per_node
        return did_not_start(rank, f"machine {node}: {reason}" if node else reason)

    def _end_reason(self, rank: int, error: Exception | None = None) -> str:
        """Return how a rank that has closed its connection has ended."""
        process = self.processes.get(rank)
        if process is None:
            machine = rank // self._topology.ranks_per_node
            if error is None or isinstance(error, EOFError | ConnectionError):
                return f"its process on machine {machine} has ended"
            return f"machine {machine} cannot be reached: {error}"
        try:
            return f"its process ended with code {process.wait(REASON_SECONDS)}"
        except subprocess.TimeoutExpired:
            return "its process has closed the connection"


class _Patience:
    """Waits for ranks to connect: for ranks of this machine with a time limit, for others without."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], topology: Topology):
        self._processes, self._topology = processes, topology
        self._started = time.monotonic()
        self._reminded = 0.0

    def check(self, connected: dict[int, Connection]) -> None:
        """Raise ConfigError if a rank of this machine has not started. Logs which machines are missing."""
        waited = time.monotonic() - self._started
        for rank, process in self._processes.items():
            if rank not in connected and (code := process.poll()) is not None:
                raise did_not_start(rank, f"its process ended with code {code}")
            if rank not in connected and waited > START_SECONDS:
                raise did_not_start(rank, f"no answer within {START_SECONDS} s")
        nodes = range(1, self._topology.num_nodes)
        missing = [node for node in nodes if not connected.keys() >= set(self._topology.ranks_of(node))]
        if missing and time.monotonic() - self._reminded > REMINDER_SECONDS:
            self._reminded = time.monotonic()
            address, port = self._topology.master_addr, self._topology.master_port
            log.warning(
                "waiting for `paged worker --master-addr %s --master-port %d` with --node-rank %s",
                address,
                port,
                ", ".join(map(str, missing)),
            )


def did_not_start(rank: int, reason: str) -> ConfigError:
    """Return the error of a rank that does not start."""
    return ConfigError(f"tensor_parallel_size: rank {rank} did not start: {reason}")
