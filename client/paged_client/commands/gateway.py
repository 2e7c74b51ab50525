"""`paged openai`: run the OpenAI-compatible gateway."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from paged_backend.text.chat_templates import RENDER_SECONDS
from paged_client.commands.arguments import port, positive_int, seconds, size
from paged_client.openai.limits import GatewayLimits
from paged_client.openai.routing import POLICIES
from paged_client.sync_client import DEFAULT_URLS

PREFILL_MIN_TOKENS = 512  # as many as a step computes by default
PREFILL_SECONDS = 60.0
LIMITS = GatewayLimits()
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("openai", help="run an OpenAI-compatible HTTP server in front of running servers")
    add = parser.add_argument
    add(
        "--url",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help=f"gRPC endpoint of a server (default: {DEFAULT_URLS['grpc']}); repeat it for several servers of the model",
    )
    add("--model", metavar="NAME", help="name of the served model (default: the server's, if it has only one)")
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="apply the chat template of this tokenizer in the gateway (default: the server applies the model's)",
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
        help="format of the model's tool calls (default: auto, detected from the template of --tokenizer;"
        " without one every format is accepted)",
    )
    add(
        "--retry-seconds",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="time for which a request without output is tried again while all servers fail, for servers that are"
        " restarted (default: each server is tried once)",
    )
    add(
        "--routing",
        choices=POLICIES,
        default="prefix",
        help="how to choose one of several servers: by the beginning of the prompt, so that its prefix cache has it,"
        " unless that server has more than its share of the open requests; or in turn (default: prefix)",
    )
    add(
        "--kv-events",
        action="append",
        default=[],
        metavar="EVENTS,REPLAY",
        help="ZeroMQ endpoints where a server publishes its KV cache events and sends past ones (kv_events_config), so"
        " that requests go to the server that has cached most of their prompt; once for each --url, in their order;"
        " needs --tokenizer and the extra 'routing'",
    )
    add(
        "--prefill-url",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="gRPC endpoint of a prefill server, which computes long prompts and writes their blocks to the remote"
        " cache that it shares with the servers of --url; may be repeated",
    )
    add(
        "--prefill-min-tokens",
        type=positive_int,
        default=PREFILL_MIN_TOKENS,
        metavar="N",
        help="number of tokens from which on a prompt is sent to a prefill server first; a quarter of the characters"
        f" of a text, and only those after the last answer of a conversation (default: {PREFILL_MIN_TOKENS})",
    )
    add(
        "--prefill-timeout",
        type=seconds,
        default=PREFILL_SECONDS,
        metavar="SECONDS",
        help="time after which the server of the request computes a prompt that no prefill server has finished"
        f" (default: {PREFILL_SECONDS:g})",
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


def openai(args: argparse.Namespace) -> int:
    from paged_client.openai import command

    return command.run(
        urls=args.url,
        model=args.model,
        tokenizer=args.tokenizer,
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
        routing=args.routing,
        kv_events=args.kv_events,
        prefill_urls=args.prefill_url,
        prefill_min_tokens=args.prefill_min_tokens,
        prefill_timeout=args.prefill_timeout,
        allowed_origins=args.allowed_origin,
        root_path=args.root_path,
    )


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be '*' or an origin like https://chat.example.com:8443")
    return text


def _root_path(text: str) -> str:
    if text and not re.fullmatch(r"(/[\w.~-]+)+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a path like /llm, without a slash at its end")
    return text
