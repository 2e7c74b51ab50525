"""Network namespaces as machines: each has its own address, and no traffic leaves this computer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path

MISSING = "network namespaces need root and the program ip (iproute2)"
PREFIX = "pgm"  # prefix of the names of bridges and namespaces, followed by the process that created them
OWN_FILES = Path("/etc/netns")  # the files of a namespace, which `ip netns exec` mounts over /etc


def ip(*arguments: str) -> None:
    """Run the program ip. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@cache
def available() -> bool:
    """Return whether namespaces and bridges can be created."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    try:
        with machines(1):
            return True
    except subprocess.CalledProcessError:
        return False


def subnet() -> IPv4Network:
    """Return the addresses of this process's machines. Other processes use other addresses: two networks with the same
    addresses disturb each other. They are from the range for tests between networks (RFC 2544)."""
    networks = list(IPv4Network("198.18.0.0/15").subnets(new_prefix=28))
    return networks[os.getpid() % len(networks)]


def server_address() -> str:
    """Return the address at which machines reach this process's namespace."""
    return str(subnet()[1])


@dataclass(frozen=True)
class Machine:
    """A network namespace that reaches this process's namespace and the other machines over a bridge."""

    name: str
    link: str  # the bridge's end of its cable
    address: str

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs a command on the machine."""
        return ["ip", "netns", "exec", self.name, *command]

    def bytes_moved(self) -> int:
        """Return the bytes that the machine has sent and received since it was created."""
        counters = Path("/sys/class/net", self.link, "statistics")
        return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def cut(self) -> None:
        """Drop all packets from and to the machine, without a message to either side."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Undo `cut`."""
        ip("link", "set", self.link, "up")


@contextmanager
def namespace(name: str) -> Iterator[None]:
    """Create a network namespace whose only interface is the loopback."""
    ip("netns", "add", name)
    try:
        files = OWN_FILES / name
        files.mkdir(parents=True, exist_ok=True)
        (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
        ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove_namespace(name)


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Create machines that reach this process's namespace at `server_address`."""
    remove_leftovers()
    bridge, network, made = f"{PREFIX}{os.getpid()}", subnet(), list[Machine]()
    ip("link", "add", bridge, "type", "bridge")
    with ExitStack() as stack:
        stack.callback(_remove_link, bridge)
        ip("addr", "add", f"{server_address()}/{network.prefixlen}", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index in range(count):
            name = f"{bridge}-{index}"
            machine = Machine(name, f"pgv{os.getpid()}-{index}", str(network[index + 2]))
            stack.enter_context(namespace(name))
            ip("link", "add", machine.link, "type", "veth", "peer", "name", "eth0", "netns", name)
            stack.callback(_remove_link, machine.link)  # the kernel removes the link of a deleted namespace only later
            ip("link", "set", machine.link, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{machine.address}/{network.prefixlen}", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            made.append(machine)
        yield made


def remove_leftovers() -> None:
    """Remove the bridges and namespaces of processes that were killed."""
    for name in [path.name for folder in ("/sys/class/net", "/run/netns") for path in Path(folder).glob(f"{PREFIX}*")]:
        process = name.removeprefix(PREFIX).partition("-")[0]
        if not process.isdecimal() or Path("/proc", process).exists():
            continue
        if "-" in name:
            _remove_namespace(name)
        else:
            _remove_link(name)


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(OWN_FILES / name, ignore_errors=True)


def _remove_link(name: str) -> None:
    subprocess.run(["ip", "link", "del", name], check=False, capture_output=True)
