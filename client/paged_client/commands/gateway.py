"""`paged openai`: run the OpenAI-compatible gateway."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from paged_backend.text.chat_templates import RENDER_SECONDS
from paged_client.commands.arguments import port, positive_int, seconds, size
from paged_client.openai.limits import GatewayLimits
from paged_client.sync_client import DEFAULT_URLS

LIMITS = GatewayLimits()
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("openai", help="run an OpenAI-compatible HTTP server in front of a running server")
    add = parser.add_argument
    add(
        "--url",
        action=_Once,
        metavar="HOST:PORT",
        help=f"gRPC endpoint of the server (default: {DEFAULT_URLS['grpc']})",
    )
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="serve only this model; may be repeated (default: all models of the server)",
    )
    add(
        "--tokenizer",
        type=_tokenizer,
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="apply the chat template of this tokenizer in the gateway, for the only model or the one of this name; may"
        " be repeated (default: the server applies the model's)",
    )
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=port, default=9000, metavar="N", help="port to listen on (default: 9000)")
    add("--api-key", action="append", default=[], metavar="KEY", help="require this API key; may be repeated")
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with one API key per line; PAGED_API_KEYS may hold more, separated by commas",
    )
    add(
        "--chat-template-timeout",
        type=seconds,
        default=RENDER_SECONDS,
        metavar="SECONDS",
        help=f"time limit for rendering the chat template of --tokenizer (default: {RENDER_SECONDS:g})",
    )
    add(
        "--max-open-requests",
        type=positive_int,
        default=LIMITS.max_open_requests,
        metavar="N",
        help=f"maximum number of concurrent requests of all clients (default: {LIMITS.max_open_requests})",
    )
    add(
        "--max-request-bytes",
        type=size,
        default=LIMITS.max_request_bytes,
        metavar="SIZE",
        help="maximum size of a request body, in bytes or with a unit like 20MB"
        f" (default: {LIMITS.max_request_bytes >> 20}MiB)",
    )
    add(
        "--max-open-bytes",
        type=size,
        default=LIMITS.max_open_bytes,
        metavar="SIZE",
        help="maximum size of the bodies of all open requests together, without the first 64 KiB of each"
        f" (default: {LIMITS.max_open_bytes >> 20}MiB)",
    )
    add(
        "--max-prompts",
        type=positive_int,
        default=LIMITS.max_prompts,
        metavar="N",
        help=f"maximum number of prompts in a completion request (default: {LIMITS.max_prompts})",
    )
    add(
        "--max-inputs",
        type=positive_int,
        default=LIMITS.max_inputs,
        metavar="N",
        help=f"maximum number of inputs in an embedding request (default: {LIMITS.max_inputs})",
    )
    add(
        "--body-timeout",
        type=seconds,
        default=LIMITS.body_timeout,
        metavar="SECONDS",
        help="time within which the headers of a request, and then its body, must be received"
        f" (default: {LIMITS.body_timeout:g})",
    )
    add(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="format of the models' tool calls (default: auto, detected from the template of --tokenizer;"
        " without one every format is accepted)",
    )
    add(
        "--retry-seconds",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="time for which a request without output is sent again while the server fails or is restarted"
        " (default: it is sent once)",
    )
    add(
        "--allowed-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages whose scripts may send requests (CORS), like https://chat.example.com, or '*' for"
        " all; may be repeated",
    )
    add(
        "--root-path",
        type=_root_path,
        default="",
        metavar="PATH",
        help="path prefix at which a proxy publishes the gateway, like /llm; paths are accepted with and without it",
    )
    add("--access-log", action="store_true", help="log each request to standard error as a line of JSON")
    parser.set_defaults(run=openai)


class _Once(argparse.Action):
    """Stores a value, and rejects a second one."""

    def __call__(self, parser: object, namespace: argparse.Namespace, value: object, option: str | None = None) -> None:
        if (first := getattr(namespace, self.dest)) is not None:
            raise argparse.ArgumentError(self, f"{value}: {first} is given too; a gateway has one server")
        setattr(namespace, self.dest, value)


def openai(args: argparse.Namespace) -> int:
    from paged_client.openai import command

    return command.run(
        url=args.url,
        models=list(dict.fromkeys(args.model)),
        tokenizers=args.tokenizer,
        host=args.host,
        port=args.port,
        api_keys=args.api_key,
        chat_template_timeout=args.chat_template_timeout,
        max_open_requests=args.max_open_requests,
        max_request_bytes=args.max_request_bytes,
        max_open_bytes=args.max_open_bytes,
        max_prompts=args.max_prompts,
        max_inputs=args.max_inputs,
        body_timeout=args.body_timeout,
        api_key_file=args.api_key_file,
        tool_parser=args.tool_parser,
        access_log=args.access_log,
        retry_seconds=args.retry_seconds,
        allowed_origins=args.allowed_origin,
        root_path=args.root_path,
    )


def _tokenizer(text: str) -> tuple[str | None, Path]:
    """Return the model, None if there is no name, and the directory. A name has no slash, so "./a=b" is a directory."""
    match = re.fullmatch(r"([^/=]+)=(.+)", text)
    return (match[1], Path(match[2])) if match else (None, Path(text))


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be '*' or an origin like https://chat.example.com:8443")
    return text


def _root_path(text: str) -> str:
    if text and not re.fullmatch(r"(/[\w.~-]+)+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a path like /llm, without a slash at its end")
    return text
