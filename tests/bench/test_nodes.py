"""The benchmark of several machines."""

import pytest

from paged_bench import _machines
from paged_client.cli import main
from tests.support.records import records_of


@pytest.mark.nightly
@pytest.mark.skipif(not _machines.available(), reason=_machines.MISSING)
def test_nodes_benchmark(tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "nodes", "--quick", "--json", str(file)]) == 0
    records = records_of(file)
    moved = records["bytes of one of 3 machines"]
    assert moved["limit"] < moved["value"] < 3 * moved["limit"]
    assert records["output, 16 streams on 3 machines"]["value"] > 0


def test_missing_namespaces_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_machines, "available", lambda: False)
    file = tmp_path / "figures.json"
    assert main(["bench", "nodes", "--quick", "--json", str(file)]) == 0
    assert "network namespaces need root" in records_of(file)["output on several machines"]["unit"]
