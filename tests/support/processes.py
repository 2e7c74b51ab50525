"""Servers and processes on this machine."""

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
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in lists for child in file.read_text().split()]
