"""Benchmarks run to their end and write what they promise. Their figures are nobody's assertion."""

import json

import pytest

from client.cli import main


def test_throughput_writes_its_records_and_a_picture(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--requests", "3", "--rounds", "2", "--json", str(file)]
    assert main(["bench", "throughput", *arguments]) == 0
    records = {record["name"]: record for record in json.loads(file.read_text())}
    assert all(list(record) == ["name", "value", "unit", "target", "limit", "peers"] for record in records.values())
    assert set(records["output_throughput"]["peers"]) == {
        "transformers, continuous",
        "transformers, one padded batch",
        "transformers, one at a time",
    }
    assert all(record["value"] > 0 for record in records.values())
    assert records["kv_slots_per_token_at_peak"]["value"] >= 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert "torch " in shown.out
    assert "round 2 of 2: paged" in shown.err


def test_a_benchmark_names_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "throughput", "--fast"])
    assert "--fast" in capsys.readouterr().err
