"""A network link with latency between this process's namespace and a new one, for kernels without netem.

Each end is a TUN device. A thread of each direction reads packets and writes them to the other device later.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_bench._machines import PREFIX, Machine, ip, namespace, server_address, subnet

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET = 65536


def _open_tun(name: str, namespace: str | None = None) -> int:
    """Return a TUN device in a network namespace. A thread of its own enters the namespace, which is a thread's."""
    found: list[int] = []

    def open_device() -> None:
        if namespace:
            with Path("/run/netns", namespace).open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        found.append(device)

    thread = threading.Thread(target=open_device)
    thread.start()
    thread.join()
    return found[0]


def _forward(source: int, target: int, seconds: float, stop: threading.Event) -> None:
    waiting: deque[tuple[float, bytes]] = deque()
    while not stop.is_set():
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
        if select.select([source], [], [], timeout)[0]:
            waiting.append((time.monotonic() + seconds, os.read(source, PACKET)))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(target, waiting.popleft()[1])


@contextmanager
def delayed_machine(milliseconds: float) -> Iterator[Machine]:
    """Create a machine whose packets take this long in each direction. It reaches this namespace at
    `server_address`."""
    name = f"{PREFIX}{os.getpid()}-d"
    machine, server = Machine(name, name, str(subnet()[2])), server_address()
    stop, devices = threading.Event(), list[int]()
    threads: list[threading.Thread] = []
    with namespace(name):
        try:
            devices += [_open_tun(name), _open_tun("tun0", name)]
            ip("addr", "add", server, "peer", machine.address, "dev", name)
            ip("link", "set", name, "up")
            ip("-n", name, "addr", "add", machine.address, "peer", server, "dev", "tun0")
            ip("-n", name, "link", "set", "tun0", "up")
            for source, target in (devices, devices[::-1]):
                thread = threading.Thread(target=_forward, args=(source, target, milliseconds / 1e3, stop))
                thread.start()
                threads.append(thread)
            yield machine
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for device in devices:
                os.close(device)
