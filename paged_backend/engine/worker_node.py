"""Runs the ranks of a machine other than the server's: `paged worker`.

It waits for a server at MASTER_ADDR and MASTER_PORT, starts the ranks of this machine, and waits for their end. Then it
waits for the next server, so that a model that is loaded again finds its ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from paged_backend.api.errors import ConfigError
from paged_backend.distributed.topology import DEFAULT_PORT, Topology, cluster_secret, read_number
from paged_backend.engine.rank import START_KEY, Invitation, read_invitation, start_rank
from paged_backend.utils.child_process import end_process

log = logging.getLogger("paged_llm")

RETRY_SECONDS = 0.5
CONNECT_SECONDS = 2
END_SECONDS = 15  # time for the other ranks to end after one has


class WorkerNode:
    """The ranks of one machine, for one server after another."""

    def __init__(self, address: str, port: int, node_rank: int, secret: bytes, model: str | None = None):
        """secret: the secret that the ranks of all machines share.

        model: the directory of the model on this machine, if it differs from the server's.
        """
        self._address, self._port = address, port
        self._node_rank, self._secret = node_rank, secret
        self._model = model
        self._warned: set[type[Exception]] = set()  # what the log has said about the address

    def run(self) -> None:
        """Serve until the process is ended. Raises ConfigError if the server's options exclude this machine."""
        while True:
            log.info("node %d waits for a server at %s:%d", self._node_rank, self._address, self._port)
            invitation = self._find_server()
            log.info("node %d joins the server", self._node_rank)
            self._run_ranks(invitation)

    def _find_server(self) -> Invitation:
        while (invitation := self._read_invitation()) is None:
            time.sleep(RETRY_SECONDS)
        return invitation

    def _read_invitation(self) -> Invitation | None:
        """Return the invitation of a server that waits for ranks; None if there is none."""
        try:
            # TCPStore would print a stack trace for each attempt without a server.
            socket.create_connection((self._address, self._port), CONNECT_SECONDS).close()
            seconds = timedelta(seconds=CONNECT_SECONDS)
            store = dist.TCPStore(self._address, self._port, is_master=False, timeout=seconds)
            if not store.check([START_KEY]):  # `get` would wait, and log that it does
                return None
            return read_invitation(store.get(START_KEY), self._secret)
        except (OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            if isinstance(error, socket.gaierror):
                self._warn_once(error, f"the address {self._address} cannot be resolved: {error.strerror}")
            elif isinstance(error, TypeError | ValueError):
                where = f"{self._address}:{self._port}"
                self._warn_once(error, f"an invitation at {where} is ignored: {error}")
            return None

    def _warn_once(self, error: Exception, message: str) -> None:
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning(message)

    def _run_ranks(self, invitation: Invitation) -> None:
        topology = Topology(invitation.size, invitation.num_nodes, self._address, self._port)
        if self._node_rank >= topology.num_nodes:
            raise ConfigError(f"node_rank={self._node_rank}: must be below nnodes={topology.num_nodes} of the server")
        environment = topology.environment(self._port)
        arguments = [self._model] if self._model else []
        processes = [
            start_rank(rank, local_rank, self._secret, environment, *arguments)
            for local_rank, rank in enumerate(topology.ranks_of(self._node_rank))
        ]
        while all(process.poll() is None for process in processes):
            time.sleep(RETRY_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        for process in processes:
            end_process(process, deadline - time.monotonic())
        log.info("the ranks of node %d have ended: %s", self._node_rank, [process.returncode for process in processes])


def main(model: str | None = None) -> None:
    """Run the ranks of the machine that the environment names: MASTER_ADDR, MASTER_PORT, NODE_RANK."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        port = read_number(os.environ, "MASTER_PORT", DEFAULT_PORT)
        node_rank = read_number(os.environ, "NODE_RANK", 1)
        WorkerNode(os.environ["MASTER_ADDR"], port, node_rank, cluster_secret(), model).run()
    except ConfigError as error:
        sys.exit(f"paged worker: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
