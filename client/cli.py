"""The `paged` command line: serve a model, ask it, talk to it, watch its memory, measure it."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from client.session import TerminalSession, UsageError, read_stdin
from client.sync_client import DEFAULT_URLS, Client
from client.types import PagedError
from client.wire import check_timeout
from paged_backend.text.chat_templates import RENDER_SECONDS

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral")
DEFAULT_MAX_TOKENS = 256
PROBE_SECONDS = 10.0
FIRST = -(2**31)  # of all priorities


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    own, rest = split_rest(list(sys.argv[1:] if argv is None else argv))
    args = build_parser().parse_args(own)
    args.rest = rest
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except UsageError as error:
        return _complain(f"paged {args.command}: {error}", EXIT_USAGE)
    except PagedError as error:
        return _complain(f"paged: {error}", EXIT_ERROR)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def _complain(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def split_rest(argv: list[str]) -> tuple[list[str], list[str]]:
    """Cut off what is not ours: tritonserver's flags after `serve … --`, all that follows `bench NAME` and
    `perf_analyzer`."""
    if argv[:1] == ["serve"] and "--" in argv:
        cut = argv.index("--")
        return argv[:cut], argv[cut + 1 :]
    if argv[:1] == ["bench"]:
        return argv[:2], argv[2:]
    if argv[:1] == ["perf_analyzer"]:
        return argv[:1], argv[1:]
    return argv, []


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paged", description="A paged-attention LLM on NVIDIA Triton.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands.add_parser("serve", help="serve a model until Ctrl-C"))
    _add_generate(commands.add_parser("generate", help="complete a prompt on a running server"))
    _add_chat(commands.add_parser("chat", help="talk to a running server"))
    _add_openai(commands.add_parser("openai", help="OpenAI's HTTP interface to a running server, until Ctrl-C"))
    _add_probe(commands.add_parser("probe", help="see whether a running server generates a token"))
    _add_map(commands.add_parser("map", help="draw the blocks of a running server's pool"))
    _add_bench(commands.add_parser("bench", help="run a benchmark"))
    _add_install_backend(commands.add_parser("install-backend", help="make the engine a backend of a tritonserver"))
    _add_perf_analyzer(commands.add_parser("perf_analyzer", help="run Triton's load generator, with its own flags"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paged serve MODEL [-o KEY=VALUE ...] [options] [-- tritonserver's own flags]"
    parser.add_argument("model", nargs="?", help="a Hugging Face directory or name, a GGUF file, or 'demo'")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="KEY=VALUE", help="an engine option")
    parser.add_argument("--http-port", type=_port, default=8000, metavar="N")
    parser.add_argument("--grpc-port", type=_port, default=8001, metavar="N")
    parser.add_argument("--metrics-port", type=_port, default=8002, metavar="N")
    parser.add_argument("--multi-lora", type=Path, metavar="FILE", help="serve the LoRA adapters that it lists")
    parser.set_defaults(run=serve)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to continue; standard input if absent or '-'")
    _add_request_options(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    parser.set_defaults(run=generate)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to start with")
    _add_request_options(parser)
    parser.set_defaults(run=chat)


def _add_openai(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help=f"a server's gRPC endpoint (default {DEFAULT_URLS['grpc']}); several take turns",
    )
    add("--model", default="paged_llm", metavar="NAME", help="the served model's name")
    add("--tokenizer", type=Path, metavar="DIR", help="apply this one's chat template here; default: the server does")
    add("--host", default="127.0.0.1", metavar="H", help="the address to listen at (default 127.0.0.1)")
    add("--port", type=_port, default=9000, metavar="N", help="(default 9000)")
    add("--api-key", action="append", default=[], metavar="K", help="ask for this key; may be repeated")
    add("--api-key-file", type=Path, metavar="FILE", help="keys, one a line; PAGED_API_KEYS has them between commas")
    add(
        "--chat-template-timeout",
        type=_seconds,
        default=RENDER_SECONDS,
        metavar="SECONDS",
        help=f"that the template of --tokenizer may take (default {RENDER_SECONDS:g})",
    )
    add("--max-open-requests", type=_count, default=4096, metavar="N", help="at a time, of all clients (default 4096)")
    add("--max-request-bytes", type=_count, default=10 << 20, metavar="N", help="of a body (default 10 MiB)")
    add("--max-prompts", type=_count, default=128, metavar="N", help="of one request for completions (default 128)")
    add("--max-inputs", type=_count, default=2048, metavar="N", help="of one for embeddings (default 2048)")
    add(
        "--body-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="in which a request's body has to be there, whole (default 30)",
    )
    add(
        "--tool-parser",
        choices=TOOL_PARSERS,
        default="auto",
        help="how the model writes calls of tools (default auto: by the template of --tokenizer, else any of the ways)",
    )
    add("--access-log", action="store_true", help="write a line of JSON to standard error for each request")
    parser.set_defaults(run=openai)


def _add_probe(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser)
    parser.set_defaults(run=probe, timeout=PROBE_SECONDS)


def _add_map(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_server_options(parser)
    add("--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    add("--once", action="store_true", help="print the picture once, without colour")
    add(
        "--samples",
        type=_count,
        metavar="N",
        help="look so often, and draw once (default 1; without end on a terminal)",
    )
    add("--png", type=Path, metavar="FILE", help="write the picture to this file")
    add("--html", type=Path, metavar="FILE", help="write it as a page that tells of each block what it is")
    parser.set_defaults(run=pool_map)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paged bench [NAME [the benchmark's own arguments]]"
    parser.add_argument("name", nargs="?", help="which one; all are listed if absent")
    parser.set_defaults(run=bench)


def _add_install_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the server's, /opt/tritonserver/backends for one")
    parser.add_argument("--name", default="paged", help="what config.pbtxt calls it (default paged; or vllm)")
    parser.set_defaults(run=install_backend)


def _add_perf_analyzer(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=perf_analyzer)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    defaults = ", ".join(f"{url} for {protocol}" for protocol, url in DEFAULT_URLS.items())
    add("--url", metavar="HOST:PORT", help=f"the server (default {defaults})")
    add("--protocol", choices=list(DEFAULT_URLS), default="grpc")
    add("--model", default="paged_llm", metavar="NAME", help="the served model's name")
    add("--timeout", type=float, metavar="SECONDS", help="limit for each answer")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    _add_server_options(parser)
    add = parser.add_argument
    add("--stats", action="store_true", help="token counts and speed, on standard error")
    add("--max-tokens", type=int, metavar="N", help=f"(default {DEFAULT_MAX_TOKENS})")
    add("--temperature", type=float, metavar="X")
    add("--top-p", type=float, metavar="X")
    add("--top-k", type=int, metavar="N")
    add("--min-p", type=float, metavar="X")
    add("--seed", type=int, metavar="N")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="any sampling parameter")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1..65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def parse_pairs(flag: str, texts: Sequence[str]) -> dict[str, object]:
    """["key=value", …] -> a mapping. A value is JSON where it parses as JSON, else the text itself."""
    pairs: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} {text}: must be KEY=VALUE")
        if key in pairs:
            raise UsageError(f"{flag} {text}: {key} is given twice")
        pairs[key] = _json_or_text(value)
    return pairs


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
_NOT_SAMPLING = ("prompt", "messages", "request_id", "timeout")  # other arguments of Client.stream


def sampling_of(args: argparse.Namespace) -> dict[str, object]:
    """The sampling parameters that the flags and -p name together."""
    flags = {key: value for key in _SAMPLING_FLAGS if (value := getattr(args, key)) is not None}
    others = parse_pairs("-p", args.parameter)
    for key in flags.keys() & others.keys():
        raise UsageError(f"-p {key}=…: --{key.replace('_', '-')} is given too")
    for key in others.keys() & set(_NOT_SAMPLING):
        raise UsageError(f"-p {key}=…: is not a sampling parameter")
    return {"max_tokens": DEFAULT_MAX_TOKENS, **flags, **others}


def serve(args: argparse.Namespace) -> int:
    options = parse_pairs("-o", args.option)
    named = options.pop("model", None)
    if (args.model is None) == (named is None):
        raise UsageError("name the model once: MODEL or -o model=…")
    model = args.model if named is None else named
    if not isinstance(model, str):
        raise UsageError(f"-o model={model!r}: must be a text")
    from client.serving import launch
    from client.serving.tritonserver import check_options
    from paged_backend.api.config import ConfigError

    try:
        check_options({**options, "model": model})
    except ConfigError as error:
        raise UsageError(f"-o {error}") from None
    return launch.serve(
        model,
        options,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        server_args=args.rest,
        multi_lora=args.multi_lora,
    )


def probe(args: argparse.Namespace) -> int:
    """0 where a token comes in time. It goes before all others, as far as clients may, as a tenant of its own, and a
    queue that is full is a sign of life, too."""
    with Client(args.url, protocol=args.protocol, model=args.model) as client:

        def ask(priority: int) -> None:
            salt = f"probe-{uuid.uuid4()}"
            client.generate(
                "ok", timeout=args.timeout, max_tokens=1, temperature=0, ignore_eos=True, priority=priority,
                cache_salt=salt,
            )  # fmt: skip

        try:
            try:
                ask(FIRST)
            except PagedError as error:
                lowest = re.search(r"priority=\S+ must be (-?\d+)\.\.\d+ \(min_priority\)", str(error))
                if not lowest:
                    raise
                ask(int(lowest[1]))
        except PagedError as error:
            if error.code != "UNAVAILABLE" or "max_queue_size" not in str(error):
                raise
    return 0


def bench(args: argparse.Namespace) -> int:
    import importlib

    from paged_backend.api.config import ConfigError

    names = _benchmarks()
    if args.name not in names:
        found = "".join(f"\n  {name}" for name in names) or " none found"
        raise UsageError(f"{args.name or 'which one'}? There are:{found}")
    module = importlib.import_module(f"paged_bench.{args.name}")
    try:
        return int(module.main(args.rest))
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _benchmarks() -> list[str]:
    import pkgutil
    from importlib.util import find_spec

    spec = find_spec("paged_bench")
    places = spec.submodule_search_locations if spec else None
    return sorted(info.name for info in pkgutil.iter_modules(places or []) if not info.name.startswith("_"))


def install_backend(args: argparse.Namespace) -> int:
    from client.serving.install import install
    from client.serving.server_files import ServerNotFoundError

    try:
        written = install(args.directory, args.name)
    except (ValueError, OSError, ServerNotFoundError) as error:
        return _complain(f"paged install-backend: {error}", EXIT_ERROR)
    print(*written, sep="\n")
    return 0


def perf_analyzer(args: argparse.Namespace) -> int:
    """Become the perf_analyzer of tritonclient, where it finds its libraries."""
    from client.serving import server_files

    found = server_files.perf_analyzer()
    if found is None:
        raise UsageError("cannot run here: it needs glibc 2.34 and tritonclient with its grpc extra")
    binary, environment = found
    os.execve(binary, [str(binary), *args.rest], environment)


def generate(args: argparse.Namespace) -> int:
    session = _session(args)
    prompt = read_stdin() if args.prompt in (None, "-") else args.prompt
    session.generate(prompt, whole=args.no_stream)
    return 0


def chat(args: argparse.Namespace) -> int:
    session = _session(args)
    history = [{"role": "system", "content": args.system}] if args.system else []
    if sys.stdin.isatty():
        import readline  # noqa: F401  gives input() editing and history

        session.chat(history)
    else:
        session.chat_once(history, read_stdin())
    return 0


def openai(args: argparse.Namespace) -> int:
    from client.openai import command

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
        max_prompts=args.max_prompts,
        max_inputs=args.max_inputs,
        body_timeout=args.body_timeout,
        api_key_file=args.api_key_file,
        tool_parser=args.tool_parser,
        access_log=args.access_log,
    )


def pool_map(args: argparse.Namespace) -> int:
    from client import map_command

    client = _client(args)
    return map_command.run(
        lambda: client.pool_map(timeout=args.timeout),
        interval=args.interval,
        once=args.once,
        samples=args.samples,
        png=args.png,
        html=args.html,
        server=f"{args.model} at {args.url or DEFAULT_URLS[args.protocol]}",
    )


def _session(args: argparse.Namespace) -> TerminalSession:
    sampling = sampling_of(args)
    return TerminalSession(_client(args), sampling, timeout=args.timeout, stats=args.stats)


def _client(args: argparse.Namespace) -> Client:
    try:
        check_timeout(args.timeout)
        return Client(args.url, args.model, args.protocol)
    except ValueError as error:
        raise UsageError(str(error)) from None
