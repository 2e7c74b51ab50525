"""`paged profile`: record a running server on this machine, and show where its time goes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from paged_backend.utils.local_socket import LONGEST_PROFILE
from paged_client.commands.arguments import EXIT_ERROR, seconds
from paged_client.commands.local_server import find_sockets, run_command
from paged_client.session import UsageError

TRACE_BYTES = 1 << 30  # maximum size of a received profile
SHOWN = 8  # functions of a thread, and threads of the server, in the tables
THREADS = ("engine", "responder")  # threads whose functions are shown; the trace has all threads
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
    socket = min(find_sockets(args.model, args.url))
    print(f"recording for {args.seconds:g} s", file=sys.stderr)
    recording = _record(socket, args.seconds)
    print("\n".join(report(recording)))
    try:
        args.output.write_text(json.dumps(recording["trace"]))
    except OSError as error:
        print(f"paged profile: --output {args.output}: {error.strerror}", file=sys.stderr)
        return EXIT_ERROR
    print(f"\nwrote {args.output}; open it in https://ui.perfetto.dev", file=sys.stderr)
    return 0


def _check_output(path: Path) -> None:
    """Raise UsageError for a file that cannot be written. A file that did not exist is not left behind."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--output {path}: must be a file in an existing directory")
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror}") from None


def _record(name: str, length: float) -> dict[str, Any]:
    """Return the server's profile. Raises PagedError."""
    recording: dict[str, Any] = next(run_command(name, {"profile": length}, TRACE_BYTES))["profile"]
    return recording


def report(recording: dict[str, Any]) -> list[str]:
    """Return the lines of the tables."""
    steps, length = recording["steps"], recording["seconds"]
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
        functions = [
            function
            for function in recording["functions"]
            if function["thread"] == thread and function["share"] >= FUNCTIONS_BELOW
        ]
        if not functions:
            continue
        lines += ["", f"{'thread':24}{'of all time':>12}  function (sampled every 5 ms; waiting counts)"]
        lines += [f"{thread:24}{function['share']:12.1%}  {function['function']}" for function in functions[:SHOWN]]
    if recording["server_threads"]:
        lines += ["", f"{'thread of tritonserver':24}{'of a core':>12}"]
        lines += [f"{entry['name'][:23]:24}{entry['share']:12.1%}" for entry in recording["server_threads"][:SHOWN]]
    return lines
