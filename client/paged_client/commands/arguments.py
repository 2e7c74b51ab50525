"""Argument types and options that several commands share."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from ipaddress import ip_address

from paged_backend.api.sizes import parse_quantity
from paged_client.discovery import find_model
from paged_client.session import UsageError
from paged_client.sync_client import DEFAULT_URLS, Client
from paged_client.wire import check_timeout

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def port(text: str) -> int:
    """Parse a TCP port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 1..65535")
    return int(text)


def address(text: str) -> str:
    """Parse an IP address to listen on."""
    try:
        return str(ip_address(text.strip("[]")))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be an IP address of this machine, or 0.0.0.0 for all of them"
        ) from None


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of seconds")
    return value


def positive_int(text: str) -> int:
    """Parse an integer that is at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)


def size(text: str) -> int:
    """Parse a size of at least 1 byte, such as 4096, 500MB or 2GiB."""
    value = int(text) if text.isascii() and text.isdecimal() else int(parse_quantity(text) or 0)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1, or a size like 20MB or 2GiB")
    return value


def parse_pairs(flag: str, texts: Sequence[str]) -> dict[str, object]:
    """Parse ["key=value", ...] into a mapping. A value that is not valid JSON is taken as a string.

    Raises UsageError, which names `flag`, for a text that is not KEY=VALUE and for a repeated key.
    """
    pairs: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} {text}: must be KEY=VALUE")
        if key in pairs:
            raise UsageError(f"{flag} {text}: {key} is given twice")
        pairs[key] = json_or_text(value)
    return pairs


def json_or_text(text: str) -> object:
    """Parse JSON; text that is not valid JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_server_options(parser: argparse.ArgumentParser, *, timeout: float | None = None) -> None:
    """Add the options that choose a server: --url, --protocol, --model and --timeout, whose default is `timeout`."""
    add = parser.add_argument
    defaults = ", ".join(f"{url} for {protocol}" for protocol, url in DEFAULT_URLS.items())
    add("--url", metavar="HOST:PORT", help=f"server address (default: {defaults})")
    add("--protocol", choices=list(DEFAULT_URLS), default="grpc", help="protocol to use (default: grpc)")
    add("--model", metavar="NAME", help="name of the served model (default: the server's, if it has only one)")
    limit = "no limit" if timeout is None else f"{timeout:g}"
    add(
        "--timeout",
        type=float,
        default=timeout,
        metavar="SECONDS",
        help=f"time limit of each request (default: {limit})",
    )


def make_client(args: argparse.Namespace) -> Client:
    """Return a client for the options of `add_server_options`, and set `args.model` if it was not given.

    Raises UsageError for an invalid option, and PagedError if the server has to be asked for its model and cannot.
    """
    try:
        check_timeout(args.timeout)
        args.model = args.model or find_model(args.url or DEFAULT_URLS[args.protocol], args.protocol, args.timeout)
        return Client(args.url, args.model, args.protocol)
    except ValueError as error:
        raise UsageError(str(error)) from None
