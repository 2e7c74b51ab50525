"""Options of benchmarks."""

import json
import re
import sys

import pytest
import torch

from paged_bench._report import Record, Records, arguments, parser, publish
from tests.support.records import without_picture


def test_explicit_options_override_quick():
    made = parser("engine", "")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--requests", type=int)

    def chosen(*argv):
        args = arguments(made, argv, {"rounds": 1, "requests": 4})
        return args.rounds, args.requests

    assert chosen() == (3, None)
    assert chosen("--quick") == (1, 4)
    assert chosen("--quick", "--rounds", "3") == (3, 4)
    assert chosen("--requests", "9", "--quick") == (1, 9)


def run(file, records):
    return Records(arguments(parser("one", ""), ["--quick", "--json", str(file)], {}), records)


def test_report_says_where_and_when_it_was_made(tmp_path):
    file = tmp_path / "figures.json"
    publish(run(file, [Record("one", 1.5, "s")]), lambda file, caption: file.write_text(caption))
    about = json.loads(file.read_text())["run"]
    assert about["command"] == f"paged bench one --quick --json {file}"
    assert about["threads"] >= 1 and about["processor"] and about["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{8,}\+?", about["commit"] or "0" * 8)
    assert about["date"][:10] in file.with_suffix(".png").read_text()


def test_interrupted_benchmark_keeps_its_records(tmp_path):
    def measure():
        yield Record("one", 1.5, "s")
        raise KeyboardInterrupt

    file = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        run(file, measure())
    report = json.loads(file.read_text())
    assert not report["complete"] and [record["name"] for record in report["records"]] == ["one"]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "figures.json"
    publish(run(file, [Record("one", 1.5, "s")]), lambda file, caption: file.write_text("a picture"))
    assert without_picture(file)["one"]["value"] == 1.5
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    assert "no picture: matplotlib is not installed" in capsys.readouterr().out
