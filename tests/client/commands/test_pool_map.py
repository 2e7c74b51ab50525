"""`paged map`: one sample, files and errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.cli import main
from tests.support.fake_servers import WAIT
from tests.support.map_views import counts_in

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("flags", [[], ["--once"]])
def test_one_sample_is_printed_without_colour(map_fake, capsys, flags):
    assert main(["map", *map_fake.flags, *flags]) == 0
    captured = capsys.readouterr()
    assert counts_in(captured.out) == {"free": 15, "cached": 1, "owned": 0, "shared": 0, "pinned": 0}
    assert "\x1b" not in captured.out
    assert captured.err == ""
    assert len(map_fake.seen.requests) == 1


def test_the_curve_uses_all_samples_and_the_grid_the_last(map_fake, capsys):
    assert main(["map", *map_fake.flags, "--samples", "4", "--interval", "0.001"]) == 0
    captured = capsys.readouterr()
    assert "the last 3.0 s" in captured.out
    assert counts_in(captured.out)["owned"] == 3
    assert "sample 4 of 4: 3 of 16 blocks in use\n" in captured.err


def test_html_page(map_fake, capsys, tmp_path):
    html = tmp_path / "a.html"
    assert main(["map", *map_fake.flags, "--samples", "2", "--interval", "0.001", "--html", str(html)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith(f"wrote {html}\n")
    assert f"paged_llm at {map_fake.seen.url}" in html.read_text(encoding="utf-8")
    assert main(["map", *map_fake.flags, "--once", "--html", str(html)]) == 0
    assert counts_in(capsys.readouterr().out)["owned"] == 2


def test_an_ascii_only_terminal(map_fake):
    command = [sys.executable, "-m", "paged_client", "map", *map_fake.flags]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=WAIT)
    assert b" 0 c..............." in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--html", "{tmp_path}/missing/a"], "--html {tmp_path}/missing/a: must be a file"),
        (["--html", "{tmp_path}"], "--html {tmp_path}: must be a file"),
        (["--timeout", "0"], "timeout=0.0"),
    ],
)
def test_wrong_usage_is_named(map_fake, capsys, tmp_path, flags, named):
    assert main(["map", *map_fake.flags, *(flag.format(tmp_path=tmp_path) for flag in flags)]) == 2
    assert named.format(tmp_path=tmp_path) in capsys.readouterr().err
    assert map_fake.seen.requests == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--interval", "0"], "must be a positive number of seconds"),
        (["--interval", "nan"], "must be a positive number of seconds"),
        (["--interval", "x"], "must be a positive number of seconds"),
        (["--samples", "0"], "must be a whole number, at least 1"),
        (["--samples", "1.5"], "must be a whole number, at least 1"),
        (["--samples", "²"], "must be a whole number, at least 1"),
    ],
)
def test_argparse_errors(capsys, flags, named):
    with pytest.raises(SystemExit, match="2"):
        main(["map", *flags])
    assert named in capsys.readouterr().err


def test_errors_of_the_server(map_fake, capsys):
    map_fake.seen.maps[:] = ["UNAVAILABLE: the engine has stopped"]
    assert main(["map", *map_fake.flags]) == 1
    assert capsys.readouterr().err == "paged: UNAVAILABLE: the engine has stopped\n"
