"""What the README claims of us names tests, and what the documents point to: all of it is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from paged_backend.api.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "kernels/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
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


def _headings(document: Path) -> set[str]:
    """As links name them."""
    titles = re.findall(r"(?m)^#+ (.+)$", document.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    for path, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not heading or heading in _headings(target), f"{path}#{heading}"


def test_every_document_is_pointed_to():
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in DOCUMENTS if path.name != "README.md" and f"{path.name})" not in readme] == []


def test_options_that_matter_for_security_are_options_with_these_defaults():
    table = (ROOT / "SECURITY.md").read_text().partition("## What to set")[2].partition("\n\nThe limits")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    options = {name: row[1] for row in rows[1:] for name in re.findall(r"`([a-z_]+)`", row[0])}
    defaults = {name: getattr(EngineConfig, name) for name in options if name != "cache_salt"}
    for name in ("trust_remote_code", "max_queue_size", "structured_outputs_timeout", "max_sessions", "max_loras"):
        assert str(defaults[name]).lower() in options[name]
