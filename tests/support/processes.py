"""Servers and processes on this machine."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from paged_client.serving.server_files import ServerNotFoundError, find_server


def _server_is_there() -> bool:
    try:
        find_server()
    except ServerNotFoundError:
        return False
    return True


needs_server = pytest.mark.skipif(not _server_is_there(), reason="no tritonserver")


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie (state Z) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of `pid`."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def listening_ports(pid: int) -> set[int]:
    """Return the IPv4 ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(entry))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def rank_processes(variable: str, value: object) -> list[int]:
    """Return the processes of an engine's ranks whose environment has this variable with this value."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if b"paged_backend.engine.rank" in command and f"{variable}={value}".encode() in environment:
            found.append(int(process.name))
    return found
