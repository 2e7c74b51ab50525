"""The generated pages of docs/reference."""

import shutil
from pathlib import Path

import pytest

from paged_backend.server.reference import main, pages, with_option_names

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
SCHEMA = ROOT / "deploy/kubernetes/chart/values.schema.json"


@pytest.mark.parametrize("name", pages())
def test_page_is_up_to_date(name):
    assert (REFERENCE / name).read_text() == pages()[name], "run make reference"


def test_the_schema_of_the_chart_has_the_names_of_all_options():
    text = SCHEMA.read_text()
    assert with_option_names(text) == text, "run make reference"
    assert with_option_names(text.replace('        "seed": true,\n', "")) == text


def test_every_entry_is_described():
    for page in pages().values():
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        assert rows
        assert all(line.split(" | ")[-1].strip(" |") for line in rows)


def test_pages_and_schema_are_written(tmp_path):
    schema = tmp_path / "values.schema.json"
    shutil.copy(SCHEMA, schema)
    main(["--write", str(tmp_path), "--schema", str(schema)])
    assert {file.name for file in tmp_path.iterdir()} == {*pages(), schema.name}
    assert schema.read_text() == SCHEMA.read_text()
