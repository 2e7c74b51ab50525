"""What `paged map` does: watch a server's pool on the terminal, or record it and draw what was recorded."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from client.map_terminal import Style, frame, terminal_size, watch
from client.map_view import Recording
from client.session import UsageError
from client.types import PoolMap


def run(
    poll: Callable[[], PoolMap],
    *,
    interval: float,
    once: bool,
    samples: int | None,
    png: Path | None,
    html: Path | None,
    server: str,
) -> int:
    """`server` is what the pictures call it. Raises UsageError for a file that cannot be written."""
    for flag, file in (("--png", png), ("--html", html)):
        if file and (file.is_dir() or not file.parent.is_dir()):
            raise UsageError(f"{flag} {file}: must be a file in a directory that there is")
    if png:
        _need_matplotlib()
    if sys.stdout.isatty() and not (once or samples or png or html):
        watch(poll, interval, sys.stdout, Style(colour="NO_COLOR" not in os.environ, unicode=_unicode()))
    recording = record(poll, interval, samples or 1)
    if once or not (png or html):
        print("\n".join(frame(recording, *terminal_size(), Style(unicode=_unicode()))))
    try:
        if png:
            from client import map_png

            map_png.draw(recording, png, server)
            print(f"wrote {png}", file=sys.stderr)
        if html:
            from client import map_html

            html.write_text(map_html.page(recording, server), encoding="utf-8")
            print(f"wrote {html}", file=sys.stderr)
    except OSError as error:
        raise UsageError(str(error)) from None
    return 0


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--png: needs matplotlib, of the extra `bench`; --html does without") from None


def _unicode() -> bool:
    """Whether standard output can carry more than ASCII."""
    try:
        "·░█▁".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def record(poll: Callable[[], PoolMap], interval: float, samples: int) -> Recording:
    """So many maps, one each `interval` seconds; more than one are counted on standard error."""
    recording, started = Recording(), time.monotonic()
    for number in range(samples):
        time.sleep(max(0.0, started + number * interval - time.monotonic()))
        recording.add(poll())
        if samples > 1:
            pool, end = recording.latest, "\r" if sys.stderr.isatty() and number < samples - 1 else "\n"
            text = f"sample {number + 1} of {samples}: {pool.used} of {pool.num_blocks} blocks held"
            print(text, end=end, file=sys.stderr, flush=True)
    return recording
