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
    assert records["end of a request after a link was cut"]["value"] > 0


@pytest.mark.nightly
@pytest.mark.skipif(not _machines.available(), reason=_machines.MISSING)
def test_nodes_benchmark_of_stages(tmp_path):
    """Stages exchange far fewer bytes than ranks that share each layer."""
    file, stages = tmp_path / "figures.json", ["--nodes", "2", "--pipeline-parallel-size", "2"]
    assert main(["bench", "nodes", "--quick", *stages, "--json", str(file)]) == 0
    moved = records_of(file)["bytes of one of 2 machines in 2 stages"]
    assert moved["limit"] < moved["value"] < 3 * moved["limit"] < 100_000


def test_machines_that_stages_do_not_divide_are_rejected(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "nodes", "--nodes", "3", "--pipeline-parallel-size", "2"])
    assert "--pipeline-parallel-size 2: must divide 3, the number of machines" in capsys.readouterr().err


def test_missing_namespaces_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_machines, "available", lambda: False)
    file = tmp_path / "figures.json"
    assert main(["bench", "nodes", "--quick", "--json", str(file)]) == 0
    assert "network namespaces need root" in records_of(file)["output on several machines"]["unit"]
