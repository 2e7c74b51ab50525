"""The `paged` command line: parses the arguments, runs a command and turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paged_backend.api.errors import LORA_NOT_ENABLED, closest_match
from paged_client.commands import dynamo, gateway, generate, plan, pool_map, profile, serve, sleep, tools, worker
from paged_client.commands.arguments import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from paged_client.commands.engine_flags import split_engine_flags
from paged_client.commands.unknown_arguments import misplaced, unrecognized
from paged_client.connection_errors import UnreachableError
from paged_client.session import UsageError
from paged_client.types import PagedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(given)
        command: Callable[[argparse.Namespace], int] = args.run
        return command(args)
    except UsageError as error:
        return _fail(f"paged {given[0]}: {error}", EXIT_USAGE)
    except PagedError as error:
        return _fail(f"paged: {error}{_hint(error)}", EXIT_ERROR)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited. Python would report the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def run() -> None:
    """Run the command in `sys.argv` and end the process, as the program `paged`.

    A failed command ends without the interpreter's own shutdown, which waits for threads: gRPC's threads can keep a
    process from exiting.
    """
    code = main()
    if code in (EXIT_ERROR, EXIT_USAGE) and sys.argv[1:2] != ["bench"]:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run_tritonserver() -> None:
    """Run `paged tritonserver` with the arguments in `sys.argv` and end the process."""
    sys.argv[1:1] = ["tritonserver"]
    run()


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. `rest` has the arguments of another program, `engine_options` the engine's flags.

    Raises UsageError for an unknown argument, which suggests a similar one. Exits if the usage is wrong otherwise.
    """
    own, rest = split_passthrough(argv)
    parser, commands = build_parser()
    if own[:1] and own[0] not in commands and (near := closest_match(own[0], commands, 0.75)):
        raise UsageError(f"unknown command; did you mean paged {near}?")
    if own[:1] and own[0].startswith("-") and own[0] not in parser._option_string_actions:
        raise UsageError(misplaced(own, commands))
    engine_options: dict[str, object] = {}
    if own[:1] and own[0] in serve.WITH_ENGINE_OPTIONS:
        own, engine_options = split_engine_flags(own, commands[own[0]]._option_string_actions, own[0])
    args, unknown = parser.parse_known_args(own)
    if unknown:
        raise UsageError(unrecognized(unknown[0], own, args.command, commands))
    args.rest, args.engine_options = rest, engine_options
    return args


def _hint(error: PagedError) -> str:
    hint = error.hint if isinstance(error, UnreachableError) else ""
    if error.code == "NOT_FOUND" and "unknown model" in error.message:
        hint = "leave --model out to use the model that the server has"
    if error.message.startswith(LORA_NOT_ENABLED):
        hint = "start the server with --multi-lora FILE to serve adapters"
    return f"\n{hint[0].upper()}{hint[1:]}." if hint else ""


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def split_passthrough(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off the arguments that belong to another program.

    These are tritonserver's options after `serve ... --`, and everything after `bench NAME`, `perf_analyzer` and
    `tritonserver`, without a `--` in front.
    """
    if argv[:1] == ["serve"] and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    if argv[:1] == ["bench"]:
        return argv[:2], argv[2:]
    if argv[:1] and argv[0] in tools.PROGRAMS:
        return argv[:1], argv[2:] if argv[1:2] == ["--"] else argv[1:]
    return argv, []


class _Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options: `--n` is not `--no-stream`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"paged {version('paged-llm-triton')}")
        except PackageNotFoundError:
            print("paged (version unknown: the package is not installed)")
        parser.exit()


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of its commands by name."""
    parser = _Parser(
        prog="paged", description="Serve language models with paged attention on NVIDIA Triton Inference Server."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (serve, plan, worker, generate, gateway, dynamo, pool_map, profile, sleep, tools):
        group.add_parsers(commands)
    return parser, commands.choices
