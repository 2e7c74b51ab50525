"""The generated pages of docs/reference."""

from pathlib import Path

import pytest

from paged_backend.server.reference import main, pages

REFERENCE = Path(__file__).parents[2] / "docs/reference"


@pytest.mark.parametrize("name", pages())
def test_page_is_up_to_date(name):
    assert (REFERENCE / name).read_text() == pages()[name], "run make reference"


def test_every_entry_is_described():
    for page in pages().values():
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        assert rows
        assert all(line.split(" | ")[-1].strip(" |") for line in rows)


def test_pages_are_written_to_a_directory(tmp_path):
    main(["--write", str(tmp_path)])
    assert {file.name for file in tmp_path.iterdir()} == set(pages())
