"""The throughput benchmark. Measured values are not checked."""

import pytest
import torch
from transformers import LlamaConfig

from paged_client.cli import main
from tests.support.in_process import save_tiny
from tests.support.records import records_of


def test_engine_benchmark(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    file = tmp_path / "figures.json"
    workloads = ["--workload", "mixed", "--workload", "beam4"]
    arguments = [
        "--model",
        str(tiny[0]),
        "--quick",
        "--requests",
        "3",
        "--rounds",
        "2",
        *workloads,
        "--json",
        str(file),
    ]
    assert main(["bench", "engine", *arguments]) == 0
    records = records_of(file)
    assert set(records["output_throughput mixed"]["peers"]) == {
        "transformers, continuous",
        "transformers, one padded batch",
        "transformers, one at a time",
    }
    assert set(records["output_throughput beam4"]["peers"]) == {"transformers, one padded batch"}
    for record in records.values():
        assert (record["value"] is None) == record["unit"].startswith("not measured: "), record
    ratio = records["output_throughput_ratio mixed (transformers, one at a time)"]
    assert ratio["peers"]["p10"] <= ratio["value"] <= ratio["peers"]["p90"]
    assert records["kv_slots_per_token_at_peak mixed"]["value"] >= 1
    for who in ("paged", "transformers, continuous"):
        first, between = (records[f"time {what} p99 mixed ({who})"] for what in ("to first token", "between tokens"))
        assert first["value"] > 0 and between["value"] > 0
    (settings,) = (
        one for name, one in records.items() if name.startswith("settings mixed (transformers, continuous):")
    )
    assert settings["name"].endswith(": sdpa, fifo") or torch.cuda.is_available()
    assert settings["peers"]["max_batch_tokens"] == 512 and settings["peers"]["max_requests_per_batch"] == 3
    if not torch.cuda.is_available():
        assert records["GPU idle mixed"]["unit"] == "not measured: no GPU"
        assert records["output_throughput_ratio mixed (transformers, continuous, tuned)"]["value"] is None
    shown = capsys.readouterr()
    assert "torch " in shown.out
    assert "round 2 of 2: paged" in shown.err


def test_latency_starts_at_the_arrival(tiny, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--workload", "alpaca", "--rate", "50", "--alone", "--requests", "4", "--rounds", "1"]
    assert main(["bench", "engine", "--model", str(tiny[0]), *arguments, "--json", str(file)]) == 0
    records = records_of(file)
    assert records["time to first token p99 alpaca (paged)"]["value"] > 0
    assert records["output_throughput alpaca"]["peers"] == {}


@pytest.mark.nightly
def test_long_prompt_fits_into_the_pool(tmp_path, capsys):
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=320)
    save_tiny(LlamaConfig(**shape, max_position_embeddings=8192), tmp_path)
    arguments = ["--model", str(tmp_path), "--quick", "--workload", "long", "--alone"]
    assert main(["bench", "engine", *arguments]) == 0
    assert "4096 prompt and 128 output tokens" in capsys.readouterr().out
