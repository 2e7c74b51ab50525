"""Network namespaces as machines: each has its own address, and no traffic leaves this computer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SUBNET = "10.213.77"
SERVER = f"{SUBNET}.1"  # this process's namespace, on the bridge
MISSING = "network namespaces need root and the program ip (iproute2)"


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


def _bridge() -> str:
    return f"pgbr{os.getpid() % 10**6}"


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Create machines with the addresses SUBNET.2 and up, and give this process's namespace the address SERVER."""
    bridge, made = _bridge(), []
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("addr", "add", f"{SERVER}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index in range(count):
            name = f"{bridge}-{index}"
            machine = Machine(name, f"pgv{os.getpid() % 10**6}-{index}", f"{SUBNET}.{index + 2}")
            ip("netns", "add", name)
            made.append(machine)
            files = Path("/etc/netns", name)  # mounted over /etc by `ip netns exec`
            files.mkdir(parents=True)
            (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
            ip("link", "add", machine.link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", machine.link, "master", bridge, "up")
            for arguments in (
                ("addr", "add", f"{machine.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *arguments)
        yield made
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns", machine.name), ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
