"""`paged bench`, `paged tritonserver` and `paged perf_analyzer`: run other programs with their own arguments."""

from __future__ import annotations

import argparse
import os

from paged_client.session import UsageError

PROGRAMS = ("tritonserver", "perf_analyzer")  # commands that pass all of their arguments on
NOT_BENCHMARKS = ("on_gpu",)  # modules that only run others: see `make bench-gpu`


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="run a benchmark")
    parser.usage = "paged bench [NAME [benchmark options]]"
    parser.add_argument("name", nargs="?", help="benchmark to run; lists all of them if omitted")
    parser.set_defaults(run=bench)

    parser = commands.add_parser("tritonserver", help="run tritonserver with its own options")
    parser.set_defaults(run=tritonserver)

    parser = commands.add_parser("perf_analyzer", help="run Triton's perf_analyzer with its own options")
    parser.set_defaults(run=perf_analyzer)


def bench(args: argparse.Namespace) -> int:
    import importlib

    from paged_backend.api.errors import ConfigError

    names = _benchmarks()
    if args.name not in names:
        listed = "".join(f"\n  {name}" for name in names) or " none found"
        given = f"unknown benchmark {args.name!r}" if args.name else "no benchmark given"
        raise UsageError(f"{given}; available:{listed}")
    module = importlib.import_module(f"paged_bench.{args.name}")
    try:
        return int(module.main(args.rest))
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _benchmarks() -> list[str]:
    """Return the names of the benchmarks: the public modules of paged_bench."""
    import pkgutil
    from importlib.util import find_spec

    spec = find_spec("paged_bench")
    places = spec.submodule_search_locations if spec else None
    names = (info.name for info in pkgutil.iter_modules(places or []))
    return sorted(name for name in names if not name.startswith("_") and name not in NOT_BENCHMARKS)


def tritonserver(args: argparse.Namespace) -> int:
    """Replace this process by the tritonserver on this machine, in an environment in which it finds the engine."""
    from paged_client.serving.server_files import ServerNotFoundError, find_server
    from paged_client.serving.trampoline import keep_files_private
    from paged_client.serving.tritonserver import server_environment

    try:
        files = find_server()
    except ServerNotFoundError as error:
        raise UsageError(str(error)) from None
    keep_files_private()
    os.execve(files.binary, files.command(args.rest), server_environment(files))


def perf_analyzer(args: argparse.Namespace) -> int:
    """Replace this process by the perf_analyzer of tritonclient, with the libraries that it needs."""
    from paged_client.serving import server_files

    analyzer = server_files.perf_analyzer()
    if analyzer is None:
        raise UsageError("cannot run here: it needs glibc 2.34 and tritonclient with its grpc extra")
    binary, environment = analyzer
    os.execve(binary, [str(binary), *args.rest], environment)
