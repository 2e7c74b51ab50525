"""What the README claims of us names tests, and those are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPARISON = "## Beside other backends"
LINK = re.compile(r"\[`(test_\w+)`\]\((tests/[\w/]+\.py)\)")


def _rows() -> list[list[str]]:
    """The comparison's lines, cell by cell."""
    section = (ROOT / "README.md").read_text().partition(COMPARISON)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_there_is_a_comparison():
    heads, *rows = _rows()
    assert heads == ["", "here", "vllm_backend", "tensorrtllm_backend", "TGI"]
    assert len(rows) > 30


@pytest.mark.parametrize("row", _rows()[1:], ids=lambda row: row[0])
def test_each_cell_of_ours_names_a_test_that_is_there(row):
    ours = row[1]
    assert len(row) == 5 and all(row)
    assert ours == "no" or LINK.search(ours), "neither a test nor a no"
    for name, file in LINK.findall(ours):
        assert name in _tests(file), f"{file} has no {name}"
