"""The benchmark of the option batch_invariant."""

from paged_bench import invariance
from paged_client.cli import main
from tests.support.records import records_of


def test_invariance_benchmark(tiny, tmp_path, monkeypatch, capsys):
    used = []
    assemble = invariance.assemble
    monkeypatch.setattr(invariance, "assemble", lambda config: used.append(config) or assemble(config))
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--model", str(tiny[0]), "--workload", "3x20/4", "--rounds", "2", "--json", str(file)]
    assert main(["bench", "invariance", *arguments]) == 0
    assert "round 2 of 2: batch_invariant" in capsys.readouterr().err
    assert [config.batch_invariant for config in used] == [False, True]
    records = records_of(file)
    assert records["3x20/4, default"]["value"] > 0
    for name in ("batch_invariant / default", "batch_invariant / default, CPU time"):
        assert records[f"3x20/4, {name}"]["target"] == 0.95
    assert file.with_suffix(".png").stat().st_size
