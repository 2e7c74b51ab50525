"""The `paged` command line: parses the arguments, runs a command and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from client.commands import gateway, generate, pool_map, serve, tools
from client.commands.arguments import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from client.session import UsageError
from client.types import PagedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    own, rest = split_passthrough(list(sys.argv[1:] if argv is None else argv))
    args = build_parser().parse_args(own)
    args.rest = rest
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except UsageError as error:
        return _fail(f"paged {args.command}: {error}", EXIT_USAGE)
    except PagedError as error:
        return _fail(f"paged: {error}", EXIT_ERROR)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited. Python would report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def split_passthrough(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off the arguments that belong to another program.

    These are tritonserver's options after `serve ... --`, and everything after `bench NAME` and `perf_analyzer`.
    """
    if argv[:1] == ["serve"] and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    if argv[:1] == ["bench"]:
        return argv[:2], argv[2:]
    if argv[:1] == ["perf_analyzer"]:
        return argv[:1], argv[1:]
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paged", description="Serve language models with paged attention on NVIDIA Triton Inference Server."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (serve, generate, gateway, pool_map, tools):
        group.add_parsers(commands)
    return parser
