"""Read the records that a benchmark wrote."""

import json
import math


def records_of(file):
    """Return the records of a benchmark by name. Checks that they have the same form, and a picture beside them."""
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return without_picture(file)


def without_picture(file):
    """Return the records of a benchmark by name, as `records_of`, where matplotlib may be missing."""
    report = json.loads(file.read_text())
    assert list(report) == ["run", "complete", "records"] and report["complete"]
    records = report["records"]
    assert all(list(record) == ["name", "value", "unit", "target", "limit", "peers"] for record in records)
    for record in records:
        figures = [record[key] for key in ("value", "target", "limit") if record[key] is not None]
        assert all(math.isfinite(figure) for figure in (*figures, *record["peers"].values())), record
    assert all((record["value"] is None) == record["unit"].startswith("not measured: ") for record in records)
    assert len({record["name"] for record in records}) == len(records)
    return {record["name"]: record for record in records}
