"""`paged serve`, `paged model-repository` and `paged install-backend`.

They run a Triton server with the engine, write a model repository for one, and add the engine to one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paged_backend.files.model_files import ADAPTER
from paged_client.commands.arguments import EXIT_ERROR, address, parse_pairs, port, seconds
from paged_client.commands.engine_flags import is_engine_flag
from paged_client.session import UsageError

OPENAI_PORT = 8003
WITH_ENGINE_OPTIONS = ("serve", "model-repository", "plan")  # commands that take engine options as flags


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model with Triton Inference Server")
    parser.usage = "paged serve MODEL [--ENGINE-OPTION VALUE ...] [options] [-- tritonserver options]"
    _add_model_arguments(parser, "Hugging Face model directory or hub name, GGUF file, or 'demo'")
    add = parser.add_argument
    add(
        "--host",
        type=address,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 opens the server to other machines (default: 127.0.0.1)",
    )
    add("--http-port", type=port, default=8000, metavar="N", help="HTTP port (default: 8000)")
    add("--grpc-port", type=port, default=8001, metavar="N", help="gRPC port (default: 8001)")
    add("--metrics-port", type=port, default=8002, metavar="N", help="metrics port (default: 8002)")
    add("--openai-port", type=port, metavar="N", help="port of an OpenAI-compatible gateway (default: there is none)")
    add(
        "--openai",
        action="store_true",
        help="serve the APIs of OpenAI and Anthropic with NVIDIA Dynamo's frontend instead of the gateway, at"
        f" --openai-port (default: {OPENAI_PORT}); its packages are installed once, into the cache",
    )
    add("--log-file", type=Path, metavar="FILE", help="file for the server's log (default: in ~/.cache/paged_llm/logs)")
    add("--verbose", action="store_true", help="print the whole log of the server")
    add("--restart", action="store_true", help="start the server again if it ends, hangs, or its engine fails")
    add(
        "--probe-interval",
        type=seconds,
        metavar="SECONDS",
        help="with --restart: time between two probes, which generate a token each (default: 10)",
    )
    add(
        "--probe-timeout",
        type=seconds,
        metavar="SECONDS",
        help="with --restart: time for a probe; two failed probes in a row restart the server (default: 30)",
    )
    parser.set_defaults(run=serve)

    parser = commands.add_parser("model-repository", help="write a model repository for tritonserver")
    parser.usage = "paged model-repository [MODEL] [--ENGINE-OPTION VALUE ...] [options]"
    _add_model_arguments(parser, "as for paged serve (default: demo)")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="missing or empty directory to write to (default: in the cache)"
    )
    parser.set_defaults(run=model_repository)

    parser = commands.add_parser("install-backend", help="install the engine as a backend of a tritonserver")
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the server's backend directory, e.g. /opt/tritonserver/backends"
    )
    parser.add_argument("--name", default="paged", help="backend name for config.pbtxt (default: paged; or vllm)")
    parser.set_defaults(run=install_backend)


def _add_model_arguments(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the arguments that `_model_options` reads. model: help text of the model."""
    add = parser.add_argument
    add("model", nargs="?", help=model)
    add(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an engine option, as --key=value does; may be repeated",
    )
    add("--name", metavar="NAME", help="name under which clients request the model (default: paged_llm)")
    add("--multi-lora", type=Path, metavar="FILE", help="JSON file of LoRA adapters (name to directory) to serve")


def _model_options(
    args: argparse.Namespace, default: str | None = None, *, is_for_here: bool = False
) -> dict[str, object]:
    """Return the engine options of a command, including the model. Raises UsageError.

    default: the model if none is given. is_for_here: whether to check that this machine can serve it.
    """
    from paged_backend.api.errors import ConfigError
    from paged_client.serving.repository import check_model, check_options

    options = parse_pairs("-o", args.option)
    for name, value in args.engine_options.items():
        if options.setdefault(name, value) != value:
            raise UsageError(f"--{name.replace('_', '-')}: -o {name}=… is given too")
    named = options.pop("model", None)
    if args.model is not None and named is not None:
        raise UsageError("the model is given twice: it is MODEL or -o model=…")
    model = next((name for name in (args.model, named, default) if name is not None), None)
    if model is None:
        raise UsageError("no model is given: it is MODEL or -o model=…")
    if not isinstance(model, str):
        raise UsageError(f"-o model={model!r}: must be a string")
    if args.name is not None and (other := options.setdefault("served_model_name", args.name)) != args.name:
        raise UsageError(f"--name {args.name}: served_model_name={other} is given too")
    if args.multi_lora:
        _check_adapters(args.multi_lora)
    elif options.get("enable_lora") is True:
        raise UsageError("--enable-lora: needs a list of adapters, --multi-lora FILE; {} in the file is an empty one")
    options = {"model": model, **options}
    try:
        check_options(options)
        if is_for_here:
            check_model(options)
    except ConfigError as error:
        name = str(error).partition("=")[0].partition(":")[0]
        if not name.isidentifier():  # a file
            raise UsageError(str(error)) from None
        if name == "model" and args.model is not None:
            raise UsageError(f"MODEL{str(error)[len(name) :]}") from None
        flag = f"--{name.replace('_', '-')}" if name in args.engine_options else f"-o {name}"
        raise UsageError(f"{flag}{str(error)[len(name) :]}") from None
    return options


def serve(args: argparse.Namespace) -> int:
    options = _model_options(args, is_for_here=True)
    times = {name: getattr(args, name) for name in ("probe_interval", "probe_timeout") if getattr(args, name)}
    if times and not args.restart:
        raise UsageError(f"--{min(times).replace('_', '-')}: has no effect without --restart")
    from paged_client.serving import launch
    from paged_client.serving.supervisor import RestartPolicy

    if engine_flag := next((argument for argument in args.rest if is_engine_flag(argument)), None):
        raise UsageError(f"{engine_flag}: is an engine option, not one of tritonserver; put it before the --")
    model = str(options.pop("model"))
    return launch.serve(
        model,
        options,
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        openai_port=args.openai_port or (OPENAI_PORT if args.openai else None),
        dynamo=args.openai,
        server_args=args.rest,
        multi_lora=args.multi_lora,
        verbose=args.verbose,
        log_file=_log_file(args.log_file, launch.default_log_file(args.http_port)),
        restart=RestartPolicy(**times) if args.restart else None,
    )


def _check_adapters(listing: Path) -> None:
    """Raise UsageError unless the file has a JSON object of names and directories, as the server requires.

    Prints a warning for a directory without an adapter, which may be added later.
    """
    try:
        adapters = json.loads(listing.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"--multi-lora {listing}: no such file; create it with {{}} in it to add adapters later"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"not JSON: {error}"
        raise UsageError(f"--multi-lora {listing}: {reason}") from None
    if not isinstance(adapters, dict) or not all(isinstance(path, str) and path for path in adapters.values()):
        raise UsageError(
            f'--multi-lora {listing}: must have a JSON object of names and directories, like {{"name": "directory"}}'
        )
    for name, directory in adapters.items():
        settings = listing.resolve().parent / directory / ADAPTER
        if not settings.is_file():
            print(f"warning: --multi-lora {listing}: {name}: {settings} does not exist", file=sys.stderr)


def _log_file(named: Path | None, default: Path) -> Path | None:
    """Return the file for the log, without changing it yet. Raises UsageError for one that cannot be written.

    Without a writable default, a warning is printed and there is no file.
    """
    from paged_client.serving.server_log import LogFile

    path = named or default
    try:
        LogFile(path, append=True).close()
    except OSError as error:
        if named:
            raise UsageError(f"--log-file {named}: {error.strerror}") from None
        print(f"warning: the log is not kept: {path}: {error.strerror}; name a file with --log-file", file=sys.stderr)
        return None
    return path.absolute()


def model_repository(args: argparse.Namespace) -> int:
    from paged_client.serving.demo_model import DemoModelError
    from paged_client.serving.repository import make_repository

    options = _model_options(args, default="demo")
    try:
        print(make_repository(options, args.multi_lora, args.directory))
    except (ValueError, OSError, DemoModelError) as error:
        print(f"paged model-repository: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def install_backend(args: argparse.Namespace) -> int:
    from paged_client.serving.install import install
    from paged_client.serving.server_files import ServerNotFoundError

    try:
        written = install(args.directory, args.name)
    except (ValueError, OSError, ServerNotFoundError) as error:
        print(f"paged install-backend: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(*written, sep="\n")
    return 0
