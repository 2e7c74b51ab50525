"""The output of `paged serve`: from given lines of a server's log, and on a pseudo-terminal."""

import os
import pty
import re
from types import SimpleNamespace

import pytest

from paged_client.serving.console import Console, Phase, parse_progress

ENGINE = "2026-11-21 10:00:00,000"


def startup(text, level="INFO"):
    return f"{ENGINE} {level} paged_llm.startup: {text}\n"


def test_console_hides_info_lines(capsys):
    console = Console(verbose=False)
    console.log_line("E1121 while loading\n")
    console.log_line(f"{ENGINE} ERROR paged_llm: disk_cache_dir: cannot be used\n")
    console.log_line(f"{ENGINE} INFO paged_llm: computing a token takes 1 ms\n")
    console.ready("Ready.")
    console.log_line("I1121 information\n")
    console.log_line("W1121 warning\n")
    console.log_line(f"{ENGINE} INFO paged_llm: loaded an adapter\n")
    console.log_line(f"{ENGINE} INFO httpx: a request\n")
    console.log_line("Traceback\n")
    shown = capsys.readouterr()
    assert shown.out == "Ready.\n"
    ours, *rest = shown.err.splitlines()
    assert ours.endswith("ERROR paged_llm: disk_cache_dir: cannot be used")
    assert rest == ["W1121 warning", "Traceback"]


def test_verbose_console_shows_all_lines(capsys):
    console = Console(verbose=True)
    console.loading(1)
    console.log_line("I1121 information\n")
    console.log_line(startup("progress: loading weights 0/2 tensors"))
    assert capsys.readouterr().err == "I1121 information\n" + startup("progress: loading weights 0/2 tensors")


def test_startup_messages_and_warnings_are_shown(capsys):
    console = Console(verbose=False)
    console.log_line(startup("Device: CPU"))
    console.log_line(startup("no effect on a CPU: enforce_eager=true", "WARNING"))
    console.log_line(f"{ENGINE} WARNING paged_llm.kernels: no C++ kernels\n")
    assert capsys.readouterr().err.splitlines() == [
        "Device: CPU",
        f"{ENGINE} WARNING paged_llm.startup: no effect on a CPU: enforce_eager=true",
        f"{ENGINE} WARNING paged_llm.kernels: no C++ kernels",
    ]


def test_without_terminal_each_phase_has_a_line_and_then_one_in_ten_seconds(capsys):
    console = Console(verbose=False)
    console.loading(0.0)
    for second in range(1, 25):
        console.log_line(startup(f"progress: downloading owner/model {second}000000/30000000 B"))
        console.loading(float(second))
    console.log_line(startup("progress: loading weights 0/7 tensors"))
    console.log_line(startup("progress: loading weights 7/7 tensors"))
    assert capsys.readouterr().err.splitlines() == [
        "Loading the model, 0 s",
        "Downloading owner/model: 3%, 1.0/30.0 MB, 0 s",
        "Downloading owner/model: 33%, 10.0/30.0 MB, 10 s",
        "Downloading owner/model: 66%, 20.0/30.0 MB, 20 s",
        "Loading weights: 0%, 0/7 tensors, 24 s",
    ]


def test_progress_is_parsed():
    assert parse_progress("progress: capturing CUDA graphs 3/67 graphs") == Phase(
        "capturing CUDA graphs", 3, 67, "graphs"
    )
    assert parse_progress("progress: x 3/0 graphs") is None
    assert parse_progress("Model: progress: x 1/2 y") is None


@pytest.fixture
def terminal(monkeypatch):
    """Make standard error a pseudo-terminal; return a function that reads what was written to it."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", buffering=1) as stream:
        # Not sys.stderr itself, which pytest sets again after the fixtures.
        monkeypatch.setattr("paged_client.serving.console.sys", SimpleNamespace(stderr=stream))

        def read():
            stream.write("<end>")  # a read may return a part of what was written
            stream.flush()
            written = ""
            while "<end>" not in written:
                written += os.read(ours, 1 << 16).decode()
            return written.removesuffix("<end>")

        yield read
    os.close(ours)


def shown_on_screen(written):
    """Return the lines that a terminal shows: `\\r`, then erase to the end of the line, empties the line."""
    return [re.split(r"\r\x1b\[K", line)[-1] for line in written.replace("\r\n", "\n").split("\n")]


def test_a_terminal_redraws_one_line(terminal, capsys):
    console = Console(verbose=False)
    console.loading(0.1)
    assert shown_on_screen(terminal()) == ["/ Loading the model, 0 s"]
    console.log_line(startup("progress: loading weights 136/272 tensors"))
    console.loading(3.0)
    console.loading(4.0)
    written = terminal()
    assert "\n" not in written
    assert shown_on_screen(written) == ["| [############------------] Loading weights: 50%, 136/272 tensors, 4 s"]
    console.log_line(startup("Device: CPU"))
    console.loading(5.0)
    assert shown_on_screen(terminal()) == ["Device: CPU", "- Starting the engine, 5 s"]
    console.ready("Ready.")
    assert shown_on_screen(terminal()) == [""]
    assert capsys.readouterr().out == "Ready.\n"


def test_a_narrow_terminal_shows_a_part_of_the_line(terminal, monkeypatch):
    monkeypatch.setattr("paged_client.serving.console._terminal_width", lambda: 20)
    Console(verbose=False).loading(0.1)
    assert shown_on_screen(terminal()) == ["/ Loading the model"]
