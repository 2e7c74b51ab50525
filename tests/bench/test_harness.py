"""The skeleton of every benchmark: options, rounds, the report and the chart. And times on a device."""

import argparse
import importlib
import json
import re
import signal
import struct
import sys
from pathlib import Path

import pytest
import torch

from paged_bench import _timing
from paged_bench._harness import (
    Bars,
    Benchmark,
    Option,
    Record,
    TimePlan,
    alternate,
    bounded,
    caption,
    count,
    draw,
    figures,
)
from paged_bench._timing import CACHES, rotations
from tests.support.records import records_of, without_picture

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))


def measure(args):
    yield Record("one", 1.5, "s")
    yield Record("two", None, "not measured: no GPU")


def benchmark(measure=measure, options=(), quick=None):
    return Benchmark(
        "First line.\n\nMore.", measure, lambda records: [Bars("s", figures(records, "(.*)"))], options, quick or {}
    )


# --- options -------------------------------------------------------------------------------------------------------


def test_explicit_options_override_quick():
    options = (
        Option("--rounds", "", 3),
        Option("--requests", "", type=count),
        Option("--sizes", "", [4, 8], many=True),
    )
    made = benchmark(options=options, quick={"rounds": 1, "requests": 4, "sizes": [2]})

    def chosen(*argv):
        args = made.arguments(argv)
        return args.rounds, args.requests, args.sizes

    assert chosen() == (3, None, [4, 8])
    assert chosen("--quick") == (1, 4, [2])
    assert chosen("--quick", "--rounds", "3", "--sizes", "5", "--sizes", "6") == (3, 4, [5, 6])
    assert chosen("--requests", "9", "--quick") == (1, 9, [2])


def test_help_has_defaults():
    options = (
        Option("--rounds", "number of rounds", 3),
        Option("--sizes", "size", [4, 8], many=True),
        Option("--dtype", "data type (default: the model's)"),
    )
    made = benchmark(options=options).parser()
    shown = " ".join(made.format_help().split())
    assert made.prog == "paged bench test_harness" and made.description == "First line."
    assert "--rounds N number of rounds (default: 3)" in shown
    assert "size; may be repeated (default: 4, 8)" in shown
    assert "data type (default: the model's)" in shown


@pytest.mark.parametrize(
    ("text", "message"), [("1", "must be at least 2, or nothing waits"), ("9", "must be at most 8")]
)
def test_numbers_outside_their_bounds_are_rejected(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        bounded(count, 2, 8, "or nothing waits")(text)


# --- rounds --------------------------------------------------------------------------------------------------------


def test_each_round_starts_with_another_contestant():
    order = []
    contestants = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    contest = alternate(contestants, 3, quiet=True)
    assert "".join(order) == "abcbcacab"
    assert contest.figures == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}
    ratio = contest.ratio("a / b", "a", "b", 1.0)
    assert (ratio.value, ratio.unit, ratio.target, ratio.peers) == (8 / 9, "x", 1.0, {"p10": 0.5, "p90": 1.5})
    assert [(one.name, one.value) for one in contest.records("time of {}", "s")] == [
        ("time of a", 6),
        ("time of b", 4),
        ("time of c", 5),
    ]


def test_warm_up_does_not_count(capsys):
    results = iter(["warm", "cold", "hot"])
    contest = alternate({"a": lambda: next(results)}, 2, len, label="{} of words", warm_up=True)
    assert contest.runs == {"a": ["cold", "hot"]} and contest.medians == {"a": 3.5}
    assert capsys.readouterr().err == (
        "warm-up: a of words ... 4\nround 1 of 2: a of words ... 4\nround 2 of 2: a of words ... 3\n"
    )


def test_contestant_that_fails_is_left_out():
    calls = []

    def fails():
        calls.append(1)
        raise RuntimeError("out of memory\nand more")

    contest = alternate({"a": lambda: 1.0, "b": fails}, 3, may_fail=["b"], quiet=True)
    assert contest.figures == {"a": [1.0] * 3} and contest.failed == {"b": "RuntimeError: out of memory"}
    assert len(calls) == 1
    with pytest.raises(RuntimeError):
        alternate({"a": lambda: 1.0, "b": fails}, 3, quiet=True)


def test_rounds_that_take_too_long_are_left_out(monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("paged_bench._harness.time.monotonic", lambda: float(next(clock)))
    assert len(alternate({"a": lambda: 1.0}, 9, quiet=True, seconds=16.0).figures["a"]) == 2
    assert len(alternate({"a": lambda: 1.0}, 9, quiet=True, seconds=0.0).figures["a"]) == 1


# --- the report ----------------------------------------------------------------------------------------------------


def test_report_says_where_and_when_it_was_made(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark()(["--quick", "--json", str(file)]) == 0
    assert records_of(file)["one"]["value"] == 1.5
    about = json.loads(file.read_text())["run"]
    assert about["command"] == f"paged bench test_harness --quick --json {file}"
    assert about["threads"] >= 1 and about["processor"] and about["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{8,}\+?", about["commit"] or "0" * 8)
    shown = capsys.readouterr().out
    assert about["date"][:10] in shown and "one: 1.5 s\ntwo: not measured: no GPU\n" in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_benchmark_keeps_its_records_and_draws_them(number, tmp_path, capsys):
    def interrupted(args):
        yield Record("one", 1.5, "s")
        signal.raise_signal(number)
        yield Record("two", 2.5, "s")

    file, before = tmp_path / "figures.json", signal.getsignal(signal.SIGTERM)
    assert benchmark(interrupted)(["--json", str(file)]) == 128 + number
    report = json.loads(file.read_text())
    assert not report["complete"] and [record["name"] for record in report["records"]] == ["one"]
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "one: 1.5 s" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "figures.json"
    benchmark()(["--json", str(file)])
    assert without_picture(file)["one"]["value"] == 1.5
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    assert "no picture: matplotlib is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_charts_show_the_recorded_figures(file, tmp_path):
    report = json.loads(file.read_text())
    made = importlib.import_module(f"paged_bench.{report['run']['command'].split()[2]}").main
    panels = list(made.panels([Record(**record) for record in report["records"]]))
    shown = [getattr(panel, "values", None) or getattr(panel, "lines", None) for panel in panels]
    assert panels and all(shown)
    draw(panels, tmp_path / "chart.png", caption(report["run"]))
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_time_of_a_reserved_part_is_not_left_for_others():
    plan = TimePlan(1000.0)
    plan.add("short", 6000.0)
    plan.add("long", 1e9)
    assert plan.left("long") == 0 < plan.left("short") < plan.left("not planned") <= 60_000


@pytest.mark.parametrize(("label", "is_higher"), [("one engine", False), ("a scenario and its engine, " * 3, True)])
def test_panels_with_long_labels_are_below_each_other(label, is_higher, tmp_path):
    draw([Bars("times", {label: 1.0})] * 3, tmp_path / "chart.png", "")
    width, height = struct.unpack(">2I", (tmp_path / "chart.png").read_bytes()[16:24])
    assert (3 * height > width) == is_higher


# --- times on a device ---------------------------------------------------------------------------------------------


def test_copies_do_not_fit_into_the_cache(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(_timing, "cache_bytes", lambda device: 1000)
    assert rotations(100, device) == 10 * CACHES
    assert rotations(100 * CACHES + 1, device) == 10
    assert rotations(1, device) == 64, "at most"
    assert rotations(10**6, device) == 1, "at least"
    assert rotations(100, device, most_bytes=250) == 2
