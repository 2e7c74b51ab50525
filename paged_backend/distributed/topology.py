"""Which ranks of an engine run on which machine, configured as torchrun does.

    machine (node)     0                    1
    ranks              0 (server), 1        2, 3           tensor_parallel_size=4, nnodes=2
    GPU, LOCAL_RANK    0, 1                 0, 1

With a pipeline, consecutive ranks form a stage: rank i is rank i % tensor_parallel_size of stage
i // tensor_parallel_size.

Rank 0 runs in the server's process, and `paged worker` runs the ranks of the other machines. All meet at the TCPStore
of rank 0, at `master_addr` and `master_port`. Whoever reaches the store while ranks join can read and change it, so a
rank believes nothing but what arrives over its link (links.py), where both sides prove that they know a secret.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.secrets import check_private, read_key

DEFAULT_PORT = 29500  # torchrun's default
LOOPBACK = "127.0.0.1"
CLUSTER_SECRET = "PAGED_CLUSTER_SECRET"  # environment variable; with `_FILE` it names a file
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Topology:
    """The machines and ranks of one engine."""

    size: int  # ranks on all machines
    num_nodes: int = 1
    master_addr: str = LOOPBACK
    master_port: int = 0  # 0: any free port, with one machine

    @classmethod
    def of(cls, config: EngineConfig, environment: Mapping[str, str] = os.environ) -> Topology:
        """Return the topology that the options set. Options that are not set are read from the environment variables of
        torchrun: NNODES, MASTER_ADDR and MASTER_PORT. Raises ConfigError."""
        nodes = config.nnodes if config.nnodes is not None else read_number(environment, "NNODES", 1)
        size = config.num_ranks
        if size % nodes:  # `EngineConfig` checks its option nnodes
            raise ConfigError(
                f"NNODES={nodes} in the environment: must divide the product of"
                f" tensor_parallel_size={config.tensor_parallel_size} and"
                f" pipeline_parallel_size={config.pipeline_parallel_size}"
            )
        if node_rank := read_number(environment, "NODE_RANK", 0):
            raise ConfigError(f"NODE_RANK={node_rank}: the server is node 0; run `paged worker` on the other machines")
        if nodes == 1:
            return cls(size)
        address = config.master_addr or environment.get("MASTER_ADDR")
        if not address:
            raise ConfigError(f"master_addr: missing; nnodes={nodes} needs an address of this machine for the others")
        port = config.master_port or read_number(environment, "MASTER_PORT", DEFAULT_PORT)
        return cls(size, nodes, address, port)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self.size // self.num_nodes

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a machine."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def environment(self, port: int) -> dict[str, str]:
        """Return the environment variables of torchrun that all ranks share. port: the port of rank 0."""
        return {"MASTER_ADDR": self.master_addr, "MASTER_PORT": str(port), "WORLD_SIZE": str(self.size)}


def cluster_secret() -> bytes:
    """Return the secret that the ranks of several machines share. Raises ConfigError if there is none, or if other
    users can read it."""
    key = read_key(CLUSTER_SECRET)
    if key is None:
        raise ConfigError(
            f"{CLUSTER_SECRET}_FILE: missing; several machines need a file with the same secret on each of them, for"
            f" example the output of openssl rand -hex 32 (or {CLUSTER_SECRET} with the secret itself)"
        )
    check_private(CLUSTER_SECRET)
    return key


def read_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return an environment variable as a number. Raises ConfigError if it is not a positive number or 0."""
    text = environment.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: must be a number")
    return int(text) if text else default


def listen(topology: Topology) -> socket.socket:
    """Return a socket that listens at the address of rank 0. Raises ConfigError if it cannot be bound."""
    try:
        return socket.create_server((topology.master_addr, topology.master_port), backlog=topology.size + 16)
    except OSError as error:
        place = f"{topology.master_addr}:{topology.master_port}"
        raise ConfigError(f"master_addr, master_port: cannot listen at {place} on this machine: {error}") from error


def interface_to(address: str) -> str | None:
    """Return the network interface through which this machine reaches an address; None if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
        except OSError:
            return None
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None
