"""`paged generate`, `paged chat` and `paged probe`: send requests to a running server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paged_client.addresses import grpc_target, host_of
from paged_client.commands.arguments import add_server_options, make_client, parse_pairs
from paged_client.discovery import DEFAULT_MODEL, find_model
from paged_client.probe import probe as probe_server
from paged_client.request_body import curl_command, http_body
from paged_client.session import ANSWER_TOKENS, AS_MANY_AS_FIT, TerminalSession, UsageError, read_stdin
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import PagedError

PROBE_SECONDS = 10.0
SHOW_SECONDS = 2.0  # time for a server to name its model to --show-request, which also works without a server
_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
_NOT_SAMPLING = ("prompt", "messages", "request_id", "timeout")  # other arguments of Client.stream


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("generate", help="generate a completion from a running server")
    parser.add_argument("prompt", nargs="?", help="prompt text; read from standard input if omitted or '-'")
    _add_request_options(parser, "the model's max_new_tokens, else as many as fit")
    parser.add_argument(
        "--show-request", action="store_true", help="print the request as a curl command instead of sending it"
    )
    parser.add_argument("--no-stream", action="store_true", help="print the output once it is complete")
    parser.set_defaults(run=generate)

    parser = commands.add_parser("chat", help="chat with a running server")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    _add_request_options(parser, f"{ANSWER_TOKENS}, or as many as fit")
    parser.set_defaults(run=chat)

    parser = commands.add_parser("probe", help="check that a running server generates a token (health check)")
    add_server_options(parser, timeout=PROBE_SECONDS)
    parser.set_defaults(run=probe)


def _add_request_options(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Add the options of a request. max_tokens: what the help says about its default."""
    add_server_options(parser)
    add = parser.add_argument
    add("--stats", action="store_true", help="print token counts and throughput to standard error")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum number of output tokens (default: {max_tokens})",
    )
    add("--temperature", type=float, metavar="X", help="sampling temperature; 0 is greedy")
    add("--top-p", type=float, metavar="X", help="cumulative probability of the tokens to sample from")
    add("--top-k", type=int, metavar="N", help="number of most likely tokens to sample from")
    add("--min-p", type=float, metavar="X", help="minimum probability, relative to the most likely token's")
    add("--seed", type=int, metavar="N", help="random seed")
    add("--stop", action="append", metavar="TEXT", help="stop string; may be repeated")
    add(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any sampling parameter; may be repeated",
    )


def sampling_params_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the sampling parameters that the flags and -p set. Raises UsageError if both set the same one."""
    flags = {key: value for key in _SAMPLING_FLAGS if (value := getattr(args, key)) is not None}
    others = parse_pairs("-p", args.parameter)
    for key in flags.keys() & others.keys():
        raise UsageError(f"-p {key}=…: --{key.replace('_', '-')} is given too")
    for key in others.keys() & set(_NOT_SAMPLING):
        raise UsageError(f"-p {key}=…: is not a sampling parameter")
    return {**flags, **others}


def generate(args: argparse.Namespace) -> int:
    sampling = sampling_params_of(args)
    prompt = read_stdin() if args.prompt in (None, "-") else args.prompt
    if args.show_request:
        print(_curl_command(args, prompt, sampling))
        if args.protocol == "grpc":
            print(
                f"note: the HTTP address is assumed to be {_http_url(args)}; pass --protocol http --url HOST:PORT for"
                " another one",
                file=sys.stderr,
            )
        return 0
    with make_client(args) as client:
        session = TerminalSession(client, sampling, timeout=args.timeout, stats=args.stats)
        session.generate(prompt, stream=not args.no_stream)
    return 0


def _curl_command(args: argparse.Namespace, prompt: str, sampling: dict[str, Any]) -> str:
    """Return the request of `paged generate` as a curl command, for the HTTP port of the server.

    Without --model the server is asked for its model. If it does not answer, the default name is used.
    """
    try:
        body = http_body(prompt, stream=not args.no_stream, **{"max_tokens": AS_MANY_AS_FIT, **sampling})
        return curl_command(_http_url(args), args.model or _model_or_default(args), body, args.timeout)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _http_url(args: argparse.Namespace) -> str:
    """Return the HTTP address of the server. With gRPC this is Triton's default port on the host of --url."""
    default: str = DEFAULT_URLS["http"]
    url: str = args.url or DEFAULT_URLS[args.protocol]
    if args.protocol == "http":
        return url
    host = host_of(grpc_target(url))
    return f"{host}:{default.rpartition(':')[2]}" if host else default


def _model_or_default(args: argparse.Namespace) -> str:
    try:
        return find_model(args.url or DEFAULT_URLS[args.protocol], args.protocol, SHOW_SECONDS)
    except PagedError as error:
        if error.code == "NOT_FOUND":
            raise
        return DEFAULT_MODEL


def chat(args: argparse.Namespace) -> int:
    sampling = sampling_params_of(args)
    history = [{"role": "system", "content": args.system}] if args.system else []
    question = None if sys.stdin and sys.stdin.isatty() else read_stdin()
    if question is not None and not question.strip():
        raise UsageError("standard input is empty; run it on a terminal, or pipe a question to it")
    with make_client(args) as client:
        session = TerminalSession(client, sampling, timeout=args.timeout, stats=args.stats)
        if question is not None:
            session.chat_once(history, question)
        else:
            from paged_client.chat import Chat

            Chat(session, history, f"{args.model} at {args.url or DEFAULT_URLS[args.protocol]}").run()
    return 0


def probe(args: argparse.Namespace) -> int:
    """Return 0 if the server generates a token in time."""
    with make_client(args) as client:
        probe_server(client, args.timeout)
    return 0
