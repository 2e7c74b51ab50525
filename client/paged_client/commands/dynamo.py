"""`paged dynamo`: connect running servers to an NVIDIA Dynamo deployment."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from paged_client.addresses import grpc_target
from paged_client.commands.arguments import address, port
from paged_client.discovery import find_models, no_model
from paged_client.serving.ports import choose_ports
from paged_client.serving.server_args import LOOPBACK
from paged_client.session import UsageError
from paged_client.sync_client import DEFAULT_URLS

SUFFIX = "DYN_NAMESPACE_WORKER_SUFFIX"  # set by Dynamo's operator, so that old and new workers do not mix in an update
ROLES = ("aggregated", "prefill", "decode")
ROUTER_MODES = ("kv", "round-robin", "random", "power-of-two", "least-loaded")
PLANES, EVENT_PLANES = ("tcp", "nats"), ("zmq", "nats")
DISCOVERY = ("etcd", "kubernetes", "file", "mem")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("dynamo", help="connect running servers to an NVIDIA Dynamo deployment, as workers")
    add = parser.add_argument
    add(
        "--url",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help=f"gRPC endpoint of a server (default: {DEFAULT_URLS['grpc']}); repeat it for a worker for each of several",
    )
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a model on the servers; may be repeated (default: all models that this engine serves)",
    )
    add("--served-model-name", metavar="NAME", help="name for Dynamo's clients, with one --model (default: its own)")
    add(
        "--model-path",
        type=Path,
        metavar="DIR",
        help="directory with the model's tokenizer and config.json (default: the path that the server names)",
    )
    add(
        "--role",
        choices=ROLES,
        default="aggregated",
        help="what the servers do: all of a request, or one part of it, for servers that share a remote cache"
        " (default: aggregated)",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="Dynamo's parser of tool calls, or 'none' (default: the one for the model's chat template)",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="Dynamo's parser of reasoning, or 'none' (default: the one for the model's chat template)",
    )
    add(
        "--kv-events",
        action="append",
        default=[],
        metavar="ENDPOINT",
        help="ZeroMQ endpoint of a server's KV cache events, like tcp://10.0.0.7:5557; once for each --url, in their"
        " order (default: the endpoint in the server's kv_events_config)",
    )
    add(
        "--frontend-port",
        type=port,
        metavar="N",
        help="also run Dynamo's frontend, at this port; its packages are installed once, into the cache",
    )
    add(
        "--frontend-host",
        type=address,
        metavar="ADDRESS",
        help="address at which the frontend listens (default: 127.0.0.1)",
    )
    add(
        "--router-mode",
        choices=ROUTER_MODES,
        help="how the frontend chooses a server: by their KV cache events and load, or one of Dynamo's other ways"
        " (default: kv)",
    )
    add(
        "--namespace",
        default="-".join(filter(None, (os.environ.get("DYN_NAMESPACE", "dynamo"), os.environ.get(SUFFIX)))),
        metavar="NAME",
        help=f"Dynamo's namespace (default: $DYN_NAMESPACE, or dynamo, and -${SUFFIX} if it is set)",
    )
    add(
        "--component",
        metavar="NAME",
        help="Dynamo's component (default: backend, or prefill with that role); workers of different"
        " models need different ones",
    )
    add(
        "--discovery-backend",
        choices=DISCOVERY,
        default=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
        help="where Dynamo's processes find each other (default: $DYN_DISCOVERY_BACKEND, or file); 'file' is the"
        " directory $DYN_FILE_KV, by default a temporary one, which only these processes know",
    )
    add(
        "--request-plane",
        choices=PLANES,
        default=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        help="how requests are sent (default: $DYN_REQUEST_PLANE, or tcp)",
    )
    add(
        "--event-plane",
        choices=EVENT_PLANES,
        default=os.environ.get("DYN_EVENT_PLANE"),
        help="how events are sent (default: $DYN_EVENT_PLANE, or Dynamo's choice for the discovery backend)",
    )
    parser.set_defaults(run=dynamo)


def dynamo(args: argparse.Namespace) -> int:
    urls = args.url or [DEFAULT_URLS["grpc"]]
    _check(args, urls)
    models = [tuple(args.model) or _models(url) for url in urls]
    for flag, value in (("--served-model-name", args.served_model_name), ("--model-path", args.model_path)):
        if value and len(most := max(models, key=len)) > 1:
            raise UsageError(f"{flag}: is for one model, not for {', '.join(most)}; choose one with --model")
    from paged_client.dynamo.processes import Fleet, router_flags
    from paged_client.dynamo.settings import FrontendSettings, WorkerSettings
    from paged_client.serving.environments import EnvironmentSetupError

    workers = [
        WorkerSettings(
            url=url,
            models=models[index],
            served_name=args.served_model_name,
            model_path=str(args.model_path) if args.model_path else None,
            namespace=args.namespace,
            component=args.component,
            role=args.role,
            discovery=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            kv_events=args.kv_events[index] if args.kv_events else None,
        )
        for index, url in enumerate(urls)
    ]
    frontend = None
    if args.frontend_port:
        flags = router_flags(args.router_mode or "kv")
        frontend = FrontendSettings(args.frontend_host or LOOPBACK, args.frontend_port, flags)
    try:
        return Fleet(workers, frontend).run()
    except (EnvironmentSetupError, ValueError) as error:
        raise UsageError(str(error)) from None


def _check(args: argparse.Namespace, urls: list[str]) -> None:
    """Raise UsageError for values that Dynamo would refuse later, or ignore."""
    for flag, given, rest in (("--url", urls, "; each must be another server"), ("--model", args.model, "")):
        for value in given:
            if given.count(value) > 1:
                raise UsageError(f"{flag} {value}: given {given.count(value)} times{rest}")
    for url in urls:
        try:
            grpc_target(url)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
    for name, known in (("discovery_backend", DISCOVERY), ("request_plane", PLANES), ("event_plane", EVENT_PLANES)):
        if (value := getattr(args, name)) not in (None, *known):  # the default is an environment variable
            raise UsageError(f"DYN_{name.upper()}={value}: must be one of {', '.join(known)}")
    for flag, value in (("--namespace", args.namespace), ("--component", args.component)):
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
            raise UsageError(f"{flag} {value!r}: must consist of letters, digits, - and _")
    if args.served_model_name == "":
        raise UsageError("--served-model-name '': must not be empty")
    for endpoint in args.kv_events:
        if not re.fullmatch(r"(tcp|ipc)://\S+", endpoint):
            raise UsageError(f"--kv-events {endpoint}: must be like tcp://10.0.0.7:5557")
    if args.kv_events and len(args.kv_events) != len(urls):
        raise UsageError(f"--kv-events: {len(args.kv_events)} given; must be one for each --url, in their order")
    if args.model_path and not args.model_path.is_dir():
        raise UsageError(f"--model-path {args.model_path}: must be a directory with the model's tokenizer")
    if args.frontend_port is None:
        for flag, value in (("--frontend-host", args.frontend_host), ("--router-mode", args.router_mode)):
            if value is not None:
                raise UsageError(f"{flag} {value}: has no effect without --frontend-port")
    else:
        try:
            choose_ports(**{"--frontend-port": args.frontend_port})
        except ValueError as error:
            raise UsageError(str(error)) from None
    if args.discovery_backend == "mem" and (args.frontend_port or len(urls) > 1):
        raise UsageError("--discovery-backend mem: is for one process; use file, etcd or kubernetes")


def _models(url: str) -> tuple[str, ...]:
    """Return the models of a server. Raises PagedError if it cannot be reached, or has none of this engine's."""
    models = find_models(url, "grpc")
    if not models:
        raise no_model(url)
    return tuple(models)
