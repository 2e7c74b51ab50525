"""`paged profile`: record a running server on this machine, and show where its time goes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from paged_backend.utils import local_socket
from paged_backend.utils.local_socket import LONGEST_PROFILE, Connection, FrameError, pack
from paged_client.commands.arguments import EXIT_ERROR, seconds
from paged_client.session import UsageError
from paged_client.types import PagedError

TRACE_BYTES = 1 << 30  # maximum size of a received profile
SHOWN = 8  # functions of a thread, and threads of the server, in the tables
THREADS = ("engine", "responder")  # those whose functions are shown; the trace has all
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LISTEN = "0A"  # state of a listening socket in /proc/net/tcp
FUNCTIONS_BELOW = 0.005  # share of time below which a function is not shown


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("profile", help="record where the time of a running server on this machine goes")
    add = parser.add_argument
    add(
        "--seconds",
        type=seconds,
        default=5.0,
        metavar="N",
        help=f"time to record, at most {LONGEST_PROFILE:g} (default: 5)",
    )
    add("--model", default="paged_llm", help="name of the model (default: paged_llm)")
    add("--url", metavar="HOST:PORT", help="gRPC or HTTP address of the server, if several here serve the model")
    add("--output", type=Path, default=Path("profile.json"), metavar="FILE",
        help="file for the trace, for https://ui.perfetto.dev or chrome://tracing (default: profile.json)")  # fmt: skip
    parser.set_defaults(run=profile)


def profile(args: argparse.Namespace) -> int:
    if args.seconds > LONGEST_PROFILE:
        raise UsageError(f"--seconds {args.seconds:g}: must be at most {LONGEST_PROFILE:g}")
    _check_output(args.output)
    socket = _socket(args.model, args.url)
    print(f"recording for {args.seconds:g} s", file=sys.stderr)
    found = _record(socket, args.seconds)
    print("\n".join(report(found)))
    try:
        args.output.write_text(json.dumps(found["trace"]))
    except OSError as error:
        print(f"paged profile: --output {args.output}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    print(f"\nwrote {args.output}; open it in https://ui.perfetto.dev", file=sys.stderr)
    return 0


def _check_output(path: Path) -> None:
    """Raise UsageError for a file that cannot be written. A file that does not exist is not left there."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--output {path}: must be a file in an existing directory")
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def _socket(model: str, url: str | None) -> str:
    """Return the name of the socket of the model's first instance. Raises UsageError unless exactly one server fits."""
    servers = local_socket.servers(model)
    if url is not None:
        servers = [server for server in servers if _local_port(url) in _ports(server)]
    if not servers:
        where = f" at {url}" if url else ""
        raise UsageError(
            f"no server of this user on this machine serves {model}{where}; in a container, run the command there"
        )
    if len(servers) > 1:
        raise UsageError(f"--url: missing; {len(servers)} servers on this machine serve {model}")
    return min(local_socket.find(model, servers[0]))


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


def _record(name: str, length: float) -> dict[str, Any]:
    """Return the server's profile. Raises PagedError."""
    connection = Connection(local_socket.connect(name), TRACE_BYTES)
    try:
        connection.send(pack({"id": 1, "profile": length}))
        for frame in connection.frames():
            if "profile" in frame:
                found: dict[str, Any] = frame["profile"]
                return found
            if error := frame.get("error"):
                raise PagedError(error["code"], error["text"].removeprefix(f"{error['code']}: "))
            if "refused" in frame:
                raise PagedError("UNAVAILABLE", frame["refused"])
    except (OSError, FrameError) as error:
        raise PagedError("UNAVAILABLE", str(error)) from None
    finally:
        connection.close()
    raise PagedError("UNAVAILABLE", "the server has closed the connection")


def report(found: dict[str, Any]) -> list[str]:
    """Return the lines of the tables."""
    steps, length = found["steps"], found["seconds"]
    if not steps["count"]:
        lines = [f"no step in {length:.1f} s"]
    else:
        lines = [
            f"{steps['count']} steps in {length:.1f} s, on average {steps['sequences']:.1f} sequences and"
            f" {steps['tokens']:.1f} tokens; {steps['replayed']} in CUDA graphs",
            "",
            f"{'phase of a step':24}{'ms per step':>12}{'of all time':>13}",
        ]
        idle = 1.0
        for name, phase in steps["phases"].items():
            lines.append(f"{name:24}{1e3 * phase['seconds']:12.3f}{phase['share']:13.1%}")
            idle -= phase["share"]
        lines.append(f"{'outside of steps':24}{'':12}{max(0.0, idle):13.1%}")
    for thread in THREADS:
        functions = [one for one in found["functions"] if one["thread"] == thread and one["share"] >= FUNCTIONS_BELOW]
        if not functions:
            continue
        lines += ["", f"{'thread':24}{'of all time':>12}  function (sampled every 5 ms; waiting counts)"]
        lines += [f"{thread:24}{one['share']:12.1%}  {one['function']}" for one in functions[:SHOWN]]
    if found["server_threads"]:
        lines += ["", f"{'thread of tritonserver':24}{'of a core':>12}"]
        lines += [f"{one['name'][:23]:24}{one['share']:12.1%}" for one in found["server_threads"][:SHOWN]]
    return lines
