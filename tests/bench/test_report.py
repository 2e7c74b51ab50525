"""Options of benchmarks."""

import sys

from paged_bench._report import Record, arguments, parser, publish
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


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "figures.json"
    publish([Record("one", 1.5, "s")], file, lambda file, caption: file.write_text("a picture"))
    assert without_picture(file)["one"]["value"] == 1.5
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"]
    assert "no picture: matplotlib is not installed" in capsys.readouterr().out
