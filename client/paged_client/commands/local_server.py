"""Commands to the engines of a server on this machine, over their local sockets (utils/local_socket.py)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import DEFAULT_FRAME_BYTES, Connection, FrameError, pack
from paged_client.session import UsageError
from paged_client.types import PagedError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


def run_command(
    name: str, command: Mapping[str, Any], max_frame_bytes: int = DEFAULT_FRAME_BYTES
) -> Iterator[dict[str, Any]]:
    """Send a command to the socket of an engine, and yield the frames of its answer. Raises PagedError.

    command: its name in a frame, and its argument. max_frame_bytes: maximum size of a frame of the answer.
    """
    connection = Connection(local_socket.connect(name), max_frame_bytes)
    try:
        connection.send(pack({"id": 1, **command}))
        for frame in connection.frames():
            if error := frame.get("error"):
                raise PagedError(error["code"], error["text"].removeprefix(f"{error['code']}: "))
            if "refused" in frame:
                raise PagedError("UNAVAILABLE", frame["refused"])
            if "id" in frame:
                yield frame
    except (OSError, FrameError) as error:
        raise PagedError("UNAVAILABLE", str(error)) from None
    finally:
        connection.close()
    raise PagedError("UNAVAILABLE", "the server has closed the connection")


def find_sockets(model: str, url: str | None) -> list[str]:
    """Return the names of the sockets of the model's instances. Raises UsageError unless exactly one server fits.

    url: HOST:PORT of the server, if several here serve the model.
    """
    servers = local_socket.servers(model)
    if url is not None:
        servers = [server for server in servers if _local_port(url) in _ports(server)]
    if not servers:
        where = f" at {url}" if url else ""
        raise UsageError(
            f"no server of this user on this machine serves {model}{where}; in a container, run the command there"
        )
    if len(servers) > 1:
        raise UsageError(
            f"--url: missing; {len(servers)} servers on this machine serve {model}: {', '.join(map(_address, servers))}"
        )
    return sorted(local_socket.find(model, servers[0]))


def _address(pid: int) -> str:
    """Return an address of a server for --url."""
    ports = sorted(_ports(pid))
    return f"localhost:{ports[0]}" if ports else f"process {pid}, which does not listen yet"


def _local_port(url: str) -> int:
    host, _, number = url.removeprefix("http://").rpartition(":")
    if host not in LOCAL_HOSTS or not number.isdecimal():
        raise UsageError(f"--url {url}: must be HOST:PORT with one of the hosts {', '.join(LOCAL_HOSTS)}")
    return int(number)


def _ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process of this user listens."""
    process, sockets, lines = Path(f"/proc/{pid}"), set(), []
    with suppress(OSError):  # the process has ended
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # the file was closed
                sockets.add(os.readlink(link))
        for kind in ("tcp", "tcp6"):
            lines += [line.split() for line in (process / "net" / kind).read_text().splitlines()]
    listening = (fields for fields in lines if fields[3] == LISTEN and f"socket:[{fields[9]}]" in sockets)
    return {int(fields[1].rpartition(":")[2], 16) for fields in listening}
