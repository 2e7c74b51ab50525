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


def test_memory_writes_its_records_and_a_picture(tiny, tmp_path):
    file = tmp_path / "figures.json"
    assert main(["bench", "memory", "--model", str(tiny[0]), "--requests", "100", "--json", str(file)]) == 0
    records = {record["name"]: record for record in json.loads(file.read_text())}
    waste = [records[f"waste ShareGPT block_size={size}"]["value"] for size in (1, 4, 16, 64, 256)]
    assert waste[0] == 0
    assert waste == sorted(waste)
    assert records["waste ShareGPT block_size=16"]["peers"]["contiguous, oracle"] > waste[2]
    for n in (2, 4, 6):
        saved = records[f"saved by sharing ShareGPT n={n}"]
        assert abs(saved["value"] - saved["peers"]["by arithmetic"]) < 1
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_names_what_it_does_not_know(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "throughput", "--fast"])
    assert "--fast" in capsys.readouterr().err


def test_kv_dtype_writes_its_records_and_a_picture(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--windows", "2", "--length", "40", "--json", str(file)]
    assert main(["bench", "kv_dtype", *arguments]) == 0
    value = {record["name"]: record["value"] for record in json.loads(file.read_text())}
    assert [value[f"bytes per token {kind}"] for kind in ("auto", "fp8", "int8")] == [12 * 64, 12 * 20, 12 * 20]
    assert value["KL divergence auto"] == 0
    assert 0 < value["KL divergence int8"] < value["KL divergence fp8"]
    assert value["same likeliest token auto"] == 100
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_speculation_writes_its_records_and_a_picture(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--model", str(tiny[0]), "--length", "20", "--output", "12", "--guesses", "3", "--rounds", "1"]
    assert main(["bench", "speculation", *arguments, "--draft", str(tiny[0]), "--json", str(file)]) == 0
    value = {record["name"]: record["value"] for record in json.loads(file.read_text())}
    for kind in ("repeating a text", "going on with one"):
        assert value[f"{kind}: accepted (3 by a model)"] > 95  # it guesses itself
        assert value[f"{kind}: tokens_per_step (3 by a model)"] > 3
        assert value[f"{kind}: throughput_ratio (3 looked up)"] > 0
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
