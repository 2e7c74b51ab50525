"""The benchmark of structured outputs."""

import re
import sys

import pytest

from paged_bench.guided import EXPRESSIONS, SCHEMAS
from paged_client.cli import main
from tests.support.records import records_of

# --- guided cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EXPRESSIONS, ids=lambda case: case.name)
def test_texts_match_their_expression_or_do_not(case):
    assert [text for text in case.good if not re.fullmatch(case.text, text)] == []
    assert [text for text in case.bad if re.fullmatch(case.text, text)] == []


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in [*SCHEMAS, *EXPRESSIONS]]
    assert len(set(names)) == len(names)


# --- guided -----------------------------------------------------------------------------------------------------------


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
