"""The benchmark of structured outputs."""

import sys

from paged_client.cli import main
from tests.support.records import records_of


def test_guided_benchmark_without_its_peer(tiny, tmp_path, capsys, monkeypatch):
    """The peer is not installed."""
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--rounds", "1", "--batches", "2", "--json", str(file)]
    assert main(["bench", "guided", *arguments]) == 0
    assert "xgrammar: not measured: " in capsys.readouterr().out
    value = {name: record["value"] for name, record in records_of(file).items()}
    assert value["JSON Schema ignored: llguidance"] == value["regular expressions ignored: llguidance"] == 0
    assert value["JSON Schema held to: llguidance"] + value["JSON Schema refused: llguidance"] == 38
    assert value["a token of a schema, 2 rows"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
