"""`paged map`: show the block pool of a running server on the terminal, or record it into an HTML page."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paged_client.commands.arguments import add_server_options, make_client, positive_int, seconds
from paged_client.map_terminal import Style, frame, terminal_size, watch
from paged_client.map_view import Recording
from paged_client.session import UsageError
from paged_client.sync_client import DEFAULT_URLS
from paged_client.types import PoolMap


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("map", help="show the KV cache blocks of a running server")
    add = parser.add_argument
    add_server_options(parser)
    add("--interval", type=seconds, default=1.0, metavar="SECONDS", help="time between two samples (default: 1)")
    add("--once", action="store_true", help="print one picture without colour and exit")
    add(
        "--samples",
        type=positive_int,
        metavar="N",
        help="number of samples to record before drawing (default: 1; on a terminal it redraws until Ctrl-C)",
    )
    add("--html", type=Path, metavar="FILE", help="write an HTML page with details of each block")
    parser.set_defaults(run=pool_map)


def pool_map(args: argparse.Namespace) -> int:
    client, file = make_client(args), args.html
    if file and (file.is_dir() or not file.parent.is_dir()):
        raise UsageError(f"--html {file}: must be a file in an existing directory")
    server = f"{args.model} at {args.url or DEFAULT_URLS[args.protocol]}"

    def poll() -> PoolMap:
        return client.pool_map(timeout=args.timeout)

    if sys.stdout.isatty() and not (args.once or args.samples or file):
        watch(poll, args.interval, sys.stdout, Style(colour="NO_COLOR" not in os.environ, unicode=_has_unicode()))
    recording = record(poll, args.interval, args.samples or 1)
    if args.once or not file:
        print("\n".join(frame(recording, *terminal_size(), Style(unicode=_has_unicode()))))
    if file:
        from paged_client import map_html

        try:
            file.write_text(map_html.page(recording, server), encoding="utf-8")
        except OSError as error:
            raise UsageError(str(error)) from None
        print(f"wrote {file}", file=sys.stderr)
    return 0


def _has_unicode() -> bool:
    """Return whether standard output can encode the characters of the picture."""
    try:
        "·░█▁".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def record(poll: Callable[[], PoolMap], interval: float, samples: int) -> Recording:
    """Poll `samples` maps, one every `interval` seconds, and report progress on standard error if there are several."""
    recording, started = Recording(), time.monotonic()
    for number in range(samples):
        time.sleep(max(0.0, started + number * interval - time.monotonic()))
        recording.add(poll())
        if samples > 1:
            pool, end = recording.latest, "\r" if sys.stderr.isatty() and number < samples - 1 else "\n"
            text = f"sample {number + 1} of {samples}: {pool.used} of {pool.num_blocks} blocks in use"
            print(text, end=end, file=sys.stderr, flush=True)
    return recording
